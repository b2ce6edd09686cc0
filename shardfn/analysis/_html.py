"""A report as a page.

In: one report, or several by name. Out: one HTML page that needs nothing else.

Draws the timeline of gathers, compute and scatters, memory over the step, bytes by
parameter, and what was planned beside what was compiled; of several reports also
their timelines, memory and bytes at one scale.
"""

import html
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from itertools import pairwise
from typing import Any

from shardfn._core.line_names import line_names, phase_in
from shardfn._core.moves import AllGather, AllReduce, ReduceScatter
from shardfn._core.shown_limits import PAGE_LEAVES, PAGE_POINTS
from shardfn.analysis._columns import COLUMNS, checked_rows
from shardfn.analysis._figures import Figures, StoredLeaf
from shardfn.analysis._hlo.timeline import HOST_WAIT, MATMUL, OTHER, WAIT, Span
from shardfn.analysis._text import seconds_text, shape_text, size_text
from shardfn.analysis.collective import Collective
from shardfn.analysis.verification import totals_of

Round = tuple[float, float, str]

_PICKS = {
    "microbatch": "one microbatch",
    "forward": "one forward iteration",
    "backward": "one backward iteration",
}


def page(reports: Mapping[str, Figures]) -> str:
    """The page, as text in UTF-8.

    Args:
      reports: what `step.on` returned, by the name that the page shows; the first one
        is shown whole when the page is opened.

    Returns:
      HTML with its styles, its script and its data inside.
    """
    template = files("shardfn.analysis").joinpath("_report.html").read_text()
    pages = [{"name": name, **page_data(r)} for name, r in reports.items()]
    data = json.dumps(pages, separators=(",", ":"))
    data = data.replace("<", "\\u003c")  # no tag, and no comment, in a name
    first = next(iter(reports.values()))
    title = html.escape(f"{first.step} on {first.target.name}")
    return template.replace("__TITLE__", title).replace("__DATA__", data)


def page_data(report: Figures) -> dict[str, Any]:
    """What the page shows, as JSON."""
    rounds = _rounds(report)
    return {
        "title": f"{report.step} on {report.target.name}",
        "subtitle": _subtitle(report),
        "tiles": _tiles(report),
        "seconds": report.step_seconds,
        "device": _merged(_device_spans(report.timeline.device), rounds),
        "links": [_link_span(s, _lines_by_name(report)) for s in report.timeline.links],
        "copies": [
            [s.start, s.end, f"to_{s.kind}", _short(s.op_name), s.bytes]
            for s in report.timeline.copies
        ],
        "rounds": rounds,
        "picks": _picks(report, rounds),
        "memory": _memory(report),
        "parameters": _parameters(report),
        "verdict": "; ".join(totals_of(report.verification)[:3]),
        "header": [column.name for column in COLUMNS],
        "lines": checked_rows(report.verification.lines),
        "footer": _footer(report),
    }


def _subtitle(report: Figures) -> str:
    axes, target = report.plan.axes, report.target
    mesh = " x ".join(f"{n}={s}" for n, s in zip(axes.names, axes.sizes, strict=True))
    return f"{target.num_devices} devices ({target.topology}), mesh {mesh}"


def _tiles(report: Figures) -> list[tuple[str, str, str, str]]:
    """Label, value, note and tone of each headline number."""
    checked, memory, m = report.verification, report.memory, report.plan.parameter_bytes
    sent = checked.wire_bytes
    hidden = f"{checked.overlapped_bytes / sent:.0%}" if sent else "0%"
    multiple = f"{sent / m:.2f} M, M = {size_text(m)}" if m else ""
    fits = "fits" if report.fits else "does not fit"
    wrong = sum(not c.ok for c in checked.lines) + len(checked.extra)
    return [
        ("step, estimated", seconds_text(report.step_seconds), "a bound", ""),
        ("MFU, estimated", f"{report.mfu:.0%}", "without rematerialized FLOPs", ""),
        (
            "peak memory",
            size_text(memory.peak),
            f"of {size_text(report.target.memory)}: {fits}",
            "" if report.fits else "bad",
        ),
        ("sent per step", size_text(sent), multiple, ""),
        ("while a matmul runs", hidden, "of the bytes sent", ""),
        (
            "exposed",
            seconds_text(report.exposed_seconds),
            f"of {seconds_text(report.transfer_seconds)} of transfers",
            "",
        ),
        (
            "compiled",
            "as planned" if checked.ok else "not as planned",
            f"{len(checked.lines)} lines, {wrong} of them otherwise"
            if wrong
            else f"{len(checked.lines)} lines",
            "good" if checked.ok else "bad",
        ),
    ]


def _kind(span: Span) -> str:
    """The colour of what runs on the device."""
    if span.kind != MATMUL:
        return WAIT if span.kind in (WAIT, HOST_WAIT) else OTHER
    return phase_in(span.op_name) or OTHER


def _device_spans(spans: Iterable[Span]) -> list[list[Any]]:
    return [[s.start, s.end, _kind(s), _short(s.op_name), 0] for s in spans]


def _short(op_name: str) -> str:
    """The last parts of a name stack, without the phases that are shown as colours."""
    parts = [part for part in op_name.split("/") if not phase_in(part)]
    return "/".join(parts[-3:])


def _merged(spans: list[list[Any]], rounds: Sequence[Round]) -> list[list[Any]]:
    """Neighbours of one kind in one iteration as one span, unless they are matmuls."""
    edges = {start for start, *_ in rounds} | {end for _, end, _ in rounds}
    out: list[list[Any]] = []
    for span in spans:
        last = out[-1] if out else None
        joins = last and last[2] == span[2] and last[1] == span[0] not in edges
        if last and joins and span[2] in (OTHER, WAIT):
            last[1], last[3] = span[1], ""
        else:
            out.append(list(span))
    return out


def _lines_by_name(report: Figures) -> dict[str, Collective]:
    return {line.name: line for line in report.plan.collectives}


def _link_span(span: Span, lines: dict[str, Collective]) -> list[Any]:
    found = [lines[n] for n in sorted(line_names(span.op_name)) if n in lines]
    label = " + ".join(dict.fromkeys(_subject(line) for line in found))
    kind, over = _move(span.kind), list(span.over)
    return [span.start, span.end, kind, label or "combined", span.bytes, over]


def _subject(line: Collective) -> str:
    return line.path or line.place


def _move(op: str) -> str:
    return op if op in (AllGather.op, ReduceScatter.op, AllReduce.op) else "exchange"


def _rounds(report: Figures) -> list[Round]:
    """Iterations of the outermost loops, each named after its pass; one of microbatches
    has both."""
    device = report.timeline.device
    out, at = [], 0
    for start, end, index in report.timeline.rounds:
        while at < len(device) and device[at].end <= start:
            at += 1
        busy: Counter[str] = Counter()
        inside = at
        while inside < len(device) and device[inside].start < end:
            span = device[inside]
            busy[_kind(span)] += span.end - span.start  # pyright: ignore
            inside += 1
        has_both = bool(busy["backward"] and busy["forward"])
        one = "backward" if busy["backward"] else "forward"
        out.append((start, end, f"{'microbatch' if has_both else one} {index}"))
    return out


def _picks(report: Figures, rounds: Sequence[Round]) -> list[tuple[str, float, float]]:
    """Parts of the step that are worth a closer look."""
    picks = [("whole step", 0.0, report.step_seconds)]
    for name, label in _PICKS.items():
        found = [r for r in rounds if r[2].startswith(name)]
        if found:
            start, end, _ = found[len(found) // 2]
            picks.insert(0, (label, start, end))
    return picks


def _memory(report: Figures) -> dict[str, Any]:
    memory, live = report.memory, report.timeline.live
    highest = max((b for _, b in live), default=0)
    drawn = size_text(memory.arguments + highest)
    return {
        "arguments": memory.arguments,
        "peak": memory.peak,
        "highest": highest,
        "live": _thinned(live, report.step_seconds),
        "text": (
            f"The step takes {size_text(memory.peak)} on each device: that is the "
            "compiler's own allocation, the dashed line. State and batch take "
            f"{size_text(memory.arguments)} of it throughout. The curve says when the "
            f"rest is needed; its highest point is {drawn}. It is an estimate from the "
            "order of the operations: a result counts from where it is made to where "
            "it is last read, and one that is made element by element is written over "
            "an operand that nothing else reads. The compiler does so in more cases, "
            "and has gaps between the arrays that live at once."
        ),
    }


def _thinned(
    live: Sequence[tuple[float, int]], seconds: float
) -> list[tuple[float, int]]:
    """The highest point of each of `PAGE_POINTS` parts of the step."""
    best: dict[int, tuple[float, int]] = {}
    for time, size in live:
        part = int(time / seconds * PAGE_POINTS) if seconds else 0
        if part not in best or best[part][1] < size:
            best[part] = (time, size)
    points = list(best.values())
    same = {b for a, b in pairwise(points) if a[1] == b[1]}
    return [p for p in points if p not in same]


def _parameters(report: Figures) -> list[dict[str, Any]]:
    """One row per leaf of the state, those that send most first."""
    sent: dict[str, Counter[str]] = {}
    for check in report.verification.lines:
        line = check.line
        for name, part in line.parts or ((line.path, line.wire_bytes),):
            share = check.wire_bytes * part // max(line.wire_bytes, 1)
            sent.setdefault(name or "no leaf", Counter())[_move(line.op)] += share
    rows = [_leaf_row(leaf, sent.pop(leaf.name, Counter())) for leaf in report.state]
    rows.sort(key=lambda row: (-sum(row["sent"].values()), -row["stored"]))
    shown, rest = rows[:PAGE_LEAVES], rows[PAGE_LEAVES:]
    if rest:
        total: Counter[str] = Counter()
        for row in rest:
            total.update(row["sent"])
        stored = sum(row["stored"] for row in rest)
        shown.append(_row(f"{len(rest)} more leaves", "", "", stored, total))
    for name, moved in sent.items():
        shown.append(_row(f"({name})", "", "", 0, moved))
    return shown


def _leaf_row(leaf: StoredLeaf, sent: Counter[str]) -> dict[str, Any]:
    return _row(leaf.name, shape_text(leaf.shape), leaf.dtype, leaf.bytes, sent)


def _row(
    name: str, shape: str, dtype: str, stored: int, sent: Counter[str]
) -> dict[str, Any]:
    return dict(name=name, shape=shape, dtype=dtype, stored=stored, sent=dict(sent))


def _footer(report: Figures) -> list[str]:
    target = report.target
    rates = (
        f"{target.flops / 1e12:.4g} TFLOP/s in bfloat16",
        f"{target.memory_bandwidth / 1e12:.3g} TB/s of device memory",
        f"{target.link_bandwidth / 1e9:.4g} GB/s each way over its links",
        f"{target.network_bandwidth / 1e9:.4g} GB/s each way over the network",
    )
    return [
        f"Rates of one device, from its vendor's data sheets: {', '.join(rates)}.",
        "Each operation takes the larger of its FLOPs and its bytes at these rates, "
        "and GPUs the gap between two kernels; collectives run one at a time, with the "
        "latency of their kind and size. What other programs do is left out. A real "
        "step is slower.",
    ]
