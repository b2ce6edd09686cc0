"""What a step would take on machines that are not there.

In: a step compiled for them. Out: a frozen report.

Bytes and collectives are read off the plan and the compiled program. Times are an
estimate: the schedule played at the rates of the vendors' data sheets.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from shardfn._core.errors import cannot_be
from shardfn._core.memories import DEVICE, HOST
from shardfn._core.reading_limits import HOST_BOUND, HOST_HIDDEN, PREALLOCATED_SHARE
from shardfn._core.tuning_limits import ADVISED, ADVISED_SHARE
from shardfn.analysis._figures import Figures
from shardfn.analysis._html import page
from shardfn.analysis._text import seconds_text, size_text


@dataclass(frozen=True, slots=True)
class Report(Figures):
    """What one step takes on a target; see `print(report)`."""

    def html(self) -> str:
        """One page that needs nothing else: timeline, memory and bytes by parameter.

        Returns:
          HTML with its styles, script and data inside; write it to a file.
        """
        return page({self.step: self})

    def __str__(self) -> str:
        parts = _head, _memory, _wire, _estimate, _advice
        return "\n".join(line for part in parts for line in part(self))


def compare(reports: Mapping[str, Report]) -> str:
    """One page of several reports: timelines, memory and bytes at one scale, and each
    of them whole.

    Args:
      reports: by the name that the page shows, such as the options that differ; one or
        more, the one to begin with first.

    Returns:
      HTML with its styles, script and data inside; write it to a file.

    Raises:
      ValueError: there is no report.

    Example:
      >>> import shardfn
      >>> pages = {"as it is": step.on("h100:8", state, batch)}  # doctest: +SKIP
      >>> pages["a layer ahead"] = ahead.on("h100:8", state, batch)  # doctest: +SKIP
      >>> html = shardfn.analysis.compare(pages)  # doctest: +SKIP
    """
    is_one = isinstance(reports, Mapping) and all(
        isinstance(report, Report) for report in reports.values()
    )
    if not is_one:
        advice = "Pass what step.on(...) returns, by name: {'as it is': report}."
        cannot_be("reports", reports, advice, "compare")
    if not reports:
        raise ValueError(
            "compare() was given no report.\n"
            "Pass what step.on(...) returns, by name: compare({'as it is': report})."
        )
    return page(reports)


def _head(report: Report) -> list[str]:
    target, axes = report.target, report.plan.axes
    mesh = " x ".join(f"{n}={s}" for n, s in zip(axes.names, axes.sizes, strict=True))
    options = [f"  compiler option {n}={value}" for n, value in report.compiler_options]
    head = f"{report.step} on {target.name}: {target.num_devices} devices, mesh {mesh}"
    if report.latencies != "xla":
        options.append(f"  latencies {report.latencies} for XLA's scheduler")
    return [head, *options]


def _memory(report: Report) -> list[str]:
    memory, target = report.memory, report.target
    whole = memory.arguments - report.stored_bytes
    verdict = "fits" if report.fits else "DOES NOT FIT"
    lines = [
        "",
        "memory per device",
        _row("stored state", size_text(report.stored_bytes)),
        _row("batch and other arguments", size_text(max(whole, 0))),
        _row("peak temporary", size_text(memory.temporary)),
        _row(
            "peak",
            size_text(memory.peak),
            f"of {size_text(target.memory)}: {verdict}",
        ),
    ]
    if taken := memory.host_arguments + memory.host_temporary:
        of = f"of {size_text(target.host_memory)} per device"
        state = size_text(report.host_bytes)
        lines.append(_row("state in the host's memory", state))
        lines.append(_row("peak there", size_text(taken), of))
    if target.platform == "cuda" and memory.peak > PREALLOCATED_SHARE * target.memory:
        lines.append(
            f"  JAX takes {PREALLOCATED_SHARE:.0%} of a GPU's memory unless "
            "XLA_PYTHON_CLIENT_MEM_FRACTION is set higher"
        )
    return lines


def _wire(report: Report) -> list[str]:
    plan, checked = report.plan, report.verification
    lines = ["", "sent by each device per step"]
    for phase in ("forward", "backward", "update"):
        sent = sum(c.wire_bytes for c in checked.lines if c.line.phase == phase)
        lines.append(_row(phase, size_text(sent)))
    if checked.extra:
        extra = sum(c.times * c.wire_bytes for c in checked.extra)
        lines.append(_row("not in the plan", size_text(extra)))
    m, sent = plan.parameter_bytes, checked.wire_bytes
    multiple = f"= {sent / m:.2f} M, M = {size_text(m)}" if m else ""
    lines.append(_row("total", size_text(sent), multiple))
    hidden = f"{checked.overlapped_bytes / sent:.0%}" if sent else "0%"
    lines.append(_row("while a matmul runs", hidden))
    lines.append(
        _row("compiled", "", "as planned" if checked.ok else "NOT as planned:")
    )
    lines += [] if checked.ok else [f"  {x}" for x in checked.problems().splitlines()]
    return lines


def _estimate(report: Report) -> list[str]:
    target, flops = report.target, report.flops
    total, model = sum(flops.run.values()), sum(flops.model.values())
    repeated = (
        f", {1 - model / total:.0%} of it rematerialized" if total > model else ""
    )
    moved = report.timeline.memory_bytes
    lines = [
        "",
        "estimate per step, at the rates of data sheets: no measurement, and a bound",
        _row(
            "matmuls",
            seconds_text(report.compute_seconds),
            f"{_flop_text(total)} at {target.flops / 1e12:.4g} TFLOP/s{repeated}"
            f"{_as_compiled(report)}",
        ),
        _row(
            "memory",
            seconds_text(report.memory_seconds),
            f"{size_text(moved)} at {target.memory_bandwidth / 1e9:.4g} GB/s",
        ),
        _row("transfers", seconds_text(report.transfer_seconds), _transfers(report)),
        *_synchronous(report),
        *_quantizer(report),
        *_host_link(report),
        *_gaps(report),
        _row("step", seconds_text(report.step_seconds), f"MFU {report.mfu:.0%}"),
    ]
    if not (report.verification.exact and flops.exact):
        lines.append("  loops without a known trip count are counted once")
    return lines


def _as_compiled(report: Report) -> str:
    """`; 344 GFLOP as compiled`, if that is more than the step asks for, as where a
    compiler multiplies all rows with the weights of every ragged group."""
    total, compiled = (
        sum(flops.values()) for flops in (report.flops.run, report.timeline.flops)
    )
    text = _flop_text(compiled)
    is_more = compiled > total and text != _flop_text(total)
    return f"; {text} as compiled" if is_more and report.flops.exact else ""


def _transfers(report: Report) -> str:
    """`0.2 ms of it latency; the device waits 1.2 ms: all_gather 1 ms, ...`"""
    waits = report.timeline.exposed_by_op
    each = ", ".join(f"{op} {seconds_text(s)}" for op, s in waits.items() if s)
    exposed = f"{seconds_text(report.exposed_seconds)} exposed"
    if least := report.timeline.exposed_in_any_order:
        exposed += f" ({seconds_text(least)} in any order within an iteration: loops"
        exposed += " send for longer than they compute)"
    latency = f"{seconds_text(report.timeline.latency)} of it latency"
    return f"{latency}; of which {exposed}{': ' * bool(each)}{each}"


def _synchronous(report: Report) -> list[str]:
    """`3 of 458 arrays, 1.5 MiB: all_reduce 2, all_gather 1`, if there are any."""
    alone = report.timeline.alone
    if not alone:
        return []
    seconds = sum(span.end - span.start for span in alone)
    sent = size_text(sum(span.bytes for span in alone))
    counts = Counter(span.kind for span in alone).most_common()
    each = ", ".join(f"{op} {count}" for op, count in counts)
    note = f"{len(alone)} of {len(report.timeline.links)} arrays, {sent}: {each}"
    return [_row("synchronous transfers", seconds_text(seconds), note)]


def _gaps(report: Report) -> list[str]:
    """What lies between kernels, where that is known."""
    if not report.gap_seconds:
        return []
    note = f"{report.timeline.kernels} kernels"
    return [_row("gaps between kernels", seconds_text(report.gap_seconds), note)]


def _quantizer(report: Report) -> list[str]:
    """What quantized moves take of the memory's time, and send, if there are any."""
    lines = [c for c in report.plan.collectives if c.block]
    if not lines:
        return []
    sent = size_text(sum(c.total_bytes for c in lines))
    moved = size_text(report.timeline.quantizer_bytes)
    note = f"{moved} of the memory's, to write and read {sent} on the wire"
    return [_row("quantizer", seconds_text(report.quantizer_seconds), note)]


def _host_link(report: Report) -> list[str]:
    """What the step copies between the memories, if it does."""
    copied = {m: report.timeline.copied(m) for m in (DEVICE, HOST)}
    if not any(copied.values()):
        return []
    rate = f"{report.target.host_bandwidth / 1e9:.4g} GB/s"
    sizes = f"{size_text(copied[DEVICE])} in and {size_text(copied[HOST])} out"
    share = report.host_exposed_seconds / report.step_seconds
    exposed = f"{seconds_text(report.host_exposed_seconds)} wait for it"
    wait = "hidden" if share < HOST_HIDDEN else f"of the step, {exposed}"
    note = f"{sizes} at {rate} each way; {wait}"
    lines = [_row("host link", seconds_text(report.host_seconds), note)]
    if share >= HOST_BOUND:
        step = seconds_text(report.step_seconds)
        lines.append(
            f"  bound by the host's link: {share:.0%} of {step} is waiting for it"
        )
    return lines


def _advice(report: Report) -> list[str]:
    """The options that may save `ADVISED_SHARE` of the step, or free as much of what
    it lacks; the two that may most, one value of each. Where it does not fit, what
    most of it is."""
    lacks = max(report.memory.peak - report.target.memory, 0)
    least, enough = ADVISED_SHARE * report.step_seconds, ADVISED_SHARE * lacks
    frees = [r for r in report.advice if lacks and -r.takes >= enough]
    rows = frees or [r for r in report.advice if r.saves >= least and not lacks]
    of_each = {tuple(name for name, _ in r.options): r for r in reversed(rows)}
    rows = [r for r in rows if r in of_each.values()][:ADVISED]
    texts = [f"  {row.text(report.step_seconds)}" for row in rows]
    if texts:
        head = "may help; python -m shardfn tune compiles such options and chooses"
        texts = ["", head, *texts]
    return [*texts, *_lacking(report, lacks)]


def _lacking(report: Report, lacks: int) -> list[str]:
    """What to do about memory that a step lacks, and that no option frees."""
    if not lacks:
        return []
    temporary = report.memory.temporary
    if temporary > report.stored_bytes:
        most, do = "activations and gathered weights", "microbatches, jax.checkpoint"
    else:
        most, do = "the state", "more devices, offload"
    return [
        "",
        f"{size_text(lacks)} are lacking, and most of the peak is {most}",
        f"  {do} or a smaller batch help; see Choosing options",
    ]


def _row(name: str, value: str, note: str = "") -> str:
    return f"  {name:<26}{value:>10}  {note}".rstrip()


def _flop_text(flops: int) -> str:
    for unit, scale in (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if flops >= scale or unit == "MFLOP":
            return f"{flops / scale:.3g} {unit}"
    raise AssertionError
