"""Measured rows in; Markdown tables of figures, and of criteria passed and missed, out.

A criterion is judged beside the best of the baselines of the same case: on `shardfn`
with no option set, and on what can be asked for (`ASKED` in `criteria_measure`).
Nothing is rounded before it is compared.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

from criteria_cases import CASES, CHIPS
from criteria_measure import ASKED, BASELINES, programs_of

Row = dict[str, Any]
Rows = dict[str, Row]
Measured = dict[tuple[str, str], Rows]
Judged = tuple[str, str, str]
"""Ours, what it is held against, and `pass` or `MISS`."""
Verdict = tuple[str, ...]
"""Criterion, case, chip, what it is held against; then, per `JUDGED`, ours and `pass`
or `MISS`."""

OURS = "shardfn"
JUDGED = (OURS, *ASKED)
SHARDED = [name for name in BASELINES if name != "replicas"]


def m_of(row: Row) -> int:
    """M: the bytes of the parameters in bfloat16."""
    return 2 * row["parameters"]


def overlapped(row: Row) -> float:
    return row["overlapped"] / max(row["wire"], 1)


def best(rows: Rows, names: list[str], figure: str) -> tuple[str, float]:
    """The least figure among baselines that compiled, and whose it is."""
    found = {n: rows[n][figure] for n in names if figure in rows.get(n, {})}
    name = min(found, key=lambda n: found[n], default="no baseline")
    return name, found.get(name, float("inf"))


def _verdict(ok: bool) -> str:
    return "pass" if ok else "MISS"


def criterion_1(ours: Row, rows: Rows) -> Judged:
    name, least = best(rows, SHARDED, "wire")
    m = m_of(ours)
    ok = ours["wire"] <= min(3 * m, least)
    held = f"3.000 M; {least / m:.3f} M, {name}"
    return f"{ours['wire'] / m:.3f} M", held, _verdict(ok)


def criterion_2(ours: Row, rows: Rows) -> Judged:
    name, least = best(rows, list(BASELINES), "temp")
    if "temp" not in ours:
        return "not measured", "", ""
    if math.isinf(least):
        return f"{ours['temp'] / 2**30:.2f} GiB", "no baseline measured", ""
    held = f"0.9 of {least / 2**30:.2f} GiB, {name}"
    part = f"{ours['temp'] / 2**30:.2f} GiB = {ours['temp'] / least:.2f}"
    return part, held, _verdict(ours["temp"] <= 0.9 * least)


def criterion_3(ours: Row, rows: Rows) -> Judged:
    part = overlapped(ours)
    others = {n: overlapped(rows[n]) for n in SHARDED if "wire" in rows.get(n, {})}
    name = max(others, key=lambda n: others[n], default="no baseline")
    held = f"95%; {others.get(name, 0):.2%}, {name}"
    return f"{part:.2%}", held, _verdict(part >= 0.95)


def criterion_5(ours: Row, rows: Rows) -> Judged:
    took, theirs = ours["seconds"], rows.get("constrained", {}).get("seconds", 0)
    held = f"1.1 of {theirs:.1f} s, constrained"
    part = f"{took:.1f} s = {took / theirs:.2f}" if theirs else f"{took:.1f} s"
    return part, held, _verdict(took <= 1.1 * theirs)


def scatters(row: Row) -> float:
    """How often the gradient of all parameters is summed over devices; not known of a
    collective matmul, which sends shards around in place of sums."""
    kinds = row["kinds"]
    if "ppermute" in kinds:
        return float("inf")
    summed = (kinds.get(op, {}).get("elements", 0) for op in ("psum_scatter", "psum"))
    return sum(summed) / row["parameters"]


def criterion_4(ours: Row, rows: Rows) -> Judged:
    sums = scatters(ours)
    others = {n: scatters(rows[n]) for n in SHARDED if "wire" in rows.get(n, {})}
    name = min(others, key=lambda n: others[n], default="no baseline")
    held = f"1 reduce-scatter; {others.get(name, 0):.2f}, {name}"
    return f"{sums:.2f} reduce-scatters", held, _verdict(sums <= 1.005)


def criterion_8(ours: Row, rows: Rows) -> Judged:
    name, least = best(rows, SHARDED, "step_s")
    if least == float("inf"):
        return "", "", ""
    held = f"0.88 of {1e3 * least:,.1f} ms, {name}"
    if "step_s" not in ours:
        return "", held, ""
    took, exposed = ours["step_s"], ours["exposed_s"]
    part = (
        f"{1e3 * took:,.1f} ms = {took / least:.2f}, {exposed / took:.1%} exposed, "
        f"{(took - exposed) / least:.2f} with none"
    )
    return part, held, _verdict(took <= 0.88 * least)


BARS: dict[int, tuple[str, Callable[[Row, Rows], Judged]]] = {
    1: ("1 wire", criterion_1),
    2: ("2 peak temp", criterion_2),
    3: ("3 overlapped", criterion_3),
    4: ("4 accumulation", criterion_4),
    5: ("5 lower + compile", criterion_5),
    8: ("8 predicted step", criterion_8),
}


def verdicts(measured: Measured) -> Iterator[Verdict]:
    for criterion, (title, judge) in BARS.items():
        for (case, chip), rows in measured.items():
            if rows and criterion in CASES[case].criteria:
                found = _judged(case, chip, rows, judge)
                if any(found):  # else no program of it was played
                    yield title, case, chip, *found
    for chip in CHIPS:
        yield from criterion_6(
            {
                CASES[case].devices: rows[OURS]
                for (case, on), rows in measured.items()
                if on == chip
                and 6 in CASES[case].criteria
                and "wire" in rows.get(OURS, {})
            },
            chip,
        )


def _judged(
    case: str, chip: str, rows: Rows, judge: Callable[[Row, Rows], Judged]
) -> tuple[str, ...]:
    missing = set(programs_of(CASES[case], chip)) - set(rows)
    if missing:
        return _padded(f"{len(missing)} programs not measured", "", "?")
    held, found = "", []
    for name in JUDGED:
        name = "shardfn defer" if name == OURS and "shardfn defer" in rows else name
        if name not in rows:
            found += ["", ""]
        elif "error" in rows[name]:
            found += [rows[name]["error"], _verdict(False)]
        else:
            part, held, verdict = judge(rows[name], rows)
            found += [part, verdict]
    return _padded(held, *found)


def _padded(held: str, *found: str) -> tuple[str, ...]:
    return held, *found, *[""] * (2 * len(JUDGED) - len(found))


def criterion_6(rows: dict[int, Row], chip: str) -> Iterator[Verdict]:
    """What grows from the fewest devices to the most."""
    if len(rows) < 2:
        return
    few, many = min(rows), max(rows)
    case = f"gpt-0.9b, {few} to {many}"
    for title, figure, limit in (
        ("6 program", "instructions", 1.0),
        ("6 compile time", "seconds", 1.2),
        ("6 wire", "wire", 1.0),
    ):
        first, most = rows[few][figure], max(r[figure] for r in rows.values())
        held = f"{limit} of that on {few} devices"
        if figure == "wire":
            ring = (1 - 1 / many) / (1 - 1 / few)
            held += f"; a ring's (n-1)/n alone is {ring:.3f}"
        part = f"{most / first:.3f}"
        ok = most <= limit * first
        yield title, case, chip, *_padded(held, part, _verdict(ok))


def criterion_7(run: dict[str, Any]) -> Verdict:
    ratios = {n: r for n, r in run["ratios"].items() if n != OURS}
    name = max(ratios, key=lambda n: ratios[n])
    seconds = run["seconds"]
    ours = f"{1e3 * seconds[OURS]:.0f} ms = {ratios[name]:.3f}"
    held = f"1.0 of {1e3 * seconds[name]:.0f} ms, {name}"
    verdict = _verdict(ratios[name] <= 1)
    return "7 step time", "8 CPU devices", "", *_padded(held, ours, verdict)


def verdicts_table(measured: Measured, run: dict[str, Any]) -> str:
    found = [*verdicts(measured), *([criterion_7(run)] if "ratios" in run else [])]
    head = ("criterion", "case", "chip", "held against", *JUDGED)
    lines = [(*v[:4], *map(_joined, v[4::2], v[5::2])) for v in found]
    text = f"{markdown(head, lines)}\n\n{_counted(found)}"
    absent = [
        f"{case} on {chip}" for (case, chip), rows in measured.items() if not rows
    ]
    return f"{text} Not measured: {', '.join(absent)}." if absent else text


def _joined(part: str, verdict: str) -> str:
    return f"{part}: {verdict}" if verdict else part


def _counted(found: list[Verdict]) -> str:
    counts = []
    for at, name in enumerate(JUDGED):
        given = [verdict[5 + 2 * at] for verdict in found]
        judged = sum(v in ("pass", "MISS") for v in given)
        counts.append(f"`{name}` passes {given.count('pass')} of {judged}")
    return f"{', '.join(counts)}."


def rows_table(measured: Measured) -> str:
    """Every figure of every program."""
    head = (
        *("case", "chip", "program", "wire / M", "overlapped", "temp GiB"),
        *("seconds", "gathers", "scatters", "all-reduces", "instructions"),
        *("step ms", "exposed ms", "memory ms"),
    )
    lines = []
    for (case, chip), rows in measured.items():
        for name, row in rows.items():
            if "error" in row:
                lines.append((case, chip, name, row["error"], *[""] * 10))
                continue
            kinds = row["kinds"]
            counts = (
                str(kinds.get(op, {}).get("runs", 0))
                for op in ("all_gather", "psum_scatter", "psum")
            )
            lines.append(
                (
                    *(case, chip, name, f"{row['wire'] / m_of(row):.3f}"),
                    *(f"{overlapped(row):.1%}", _gib(row)),
                    *(f"{row['seconds']:.1f}", *counts, str(row["instructions"])),
                    *(_milliseconds(row, f"{part}_s") for part in PARTS),
                )
            )
    return markdown(head, lines)


def _gib(row: Row) -> str:
    """Temporary memory; nothing where a row has libtpu's summary in its place."""
    return f"{row['temp'] / 2**30:.2f}" if "temp" in row else ""


PARTS = ("step", "exposed", "memory")


def _milliseconds(row: Row, figure: str) -> str:
    return f"{1e3 * row[figure]:,.1f}" if figure in row else ""


def markdown(head: tuple[str, ...], lines: list[tuple[str, ...]]) -> str:
    text = [head, ("---",) * len(head), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in text)
