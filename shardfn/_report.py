"""A step compiled for machines that are not there; what it would take on them, out.

Bytes and collectives are read off the plan and the compiled program. Times are an
estimate: the schedule played at the rates of the vendors' data sheets.
"""

from dataclasses import dataclass, field
from typing import Any

from shardfn._flops import Flops
from shardfn._hlo.timeline import Timeline
from shardfn._plan import Plan
from shardfn._plan_table import size_text
from shardfn._verification import Verification
from shardfn.targets import Target

PREALLOCATED = 0.75
"""The part of a GPU's memory that JAX takes by default; its documentation on GPU memory
allocation names the variable that sets it."""


@dataclass(frozen=True, slots=True)
class StoredLeaf:
    """One leaf of the state, as stored.

    Attributes:
      name: its path.
      shape: whole, without padding.
      dtype: its dtype.
      bytes: on one device, padding included.
      split: whether devices hold parts of it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    split: bool


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one device, by the compiler's own account.

    Attributes:
      arguments: state and batch.
      outputs: new state and metrics.
      aliased: outputs that are written over donated arguments.
      temporary: peak of everything else while the step runs.
      code: of the program.
    """

    arguments: int
    outputs: int
    aliased: int
    temporary: int
    code: int

    @property
    def peak(self) -> int:
        """Arguments, temporaries, code, and outputs that are not aliased."""
        kept = self.arguments + self.outputs - self.aliased
        return kept + self.temporary + self.code


@dataclass(frozen=True, slots=True)
class Report:
    """What one step takes on a target; see `print(report)`.

    Attributes:
      step: name of the plain step.
      target: the machine, with its rates.
      plan: the plan.
      verification: what the compiler made of it.
      state: leaves of the state.
      memory: bytes on one device.
      flops: of matmuls on one device.
      timeline: the schedule played at the target's rates.
      compiler_options: what the compiler was told besides.
    """

    step: str
    target: Target
    plan: Plan
    verification: Verification
    state: tuple[StoredLeaf, ...] = field(repr=False)
    memory: Memory
    flops: Flops
    timeline: Timeline = field(repr=False)
    compiler_options: tuple[tuple[str, Any], ...] = ()

    @property
    def stored_bytes(self) -> int:
        """Bytes of the state on one device."""
        return sum(leaf.bytes for leaf in self.state)

    @property
    def fits(self) -> bool:
        """Whether the peak is at most the memory of one device."""
        return self.memory.peak <= self.target.memory

    @property
    def compute_seconds(self) -> float:
        """Matmuls alone, at the peak rate."""
        flops = self.flops.run.items()
        return sum(n / self.target.matmul_rate(dtype) for dtype, n in flops)

    @property
    def memory_seconds(self) -> float:
        """Reads and writes of device memory alone."""
        return self.timeline.memory_bytes / self.target.memory_bandwidth

    @property
    def transfer_seconds(self) -> float:
        """Collectives alone."""
        return self.timeline.transfers

    @property
    def exposed_seconds(self) -> float:
        """The part of `transfer_seconds` that the device waits for."""
        return self.timeline.exposed

    @property
    def step_seconds(self) -> float:
        """Estimated duration of one step."""
        return self.timeline.seconds

    @property
    def mfu(self) -> float:
        """Estimated model FLOPs utilization: FLOPs of the model, without those repeated
        by rematerialization, over what the device could do in the step's time."""
        total = sum(self.flops.model.values())
        return total / (self.step_seconds * self.target.flops) if total else 0.0

    def html(self) -> str:
        """One page that needs nothing else: timeline, memory and bytes by parameter.

        Returns:
          HTML with its styles, script and data inside; write it to a file.
        """
        from shardfn._page import page

        return page(self)

    def __str__(self) -> str:
        return "\n".join([*_head(self), *_memory(self), *_wire(self), *_estimate(self)])


def _head(report: Report) -> list[str]:
    target, axes = report.target, report.plan.axes
    mesh = " x ".join(f"{n}={s}" for n, s in zip(axes.names, axes.sizes, strict=True))
    told = [f"  compiler option {n}={value}" for n, value in report.compiler_options]
    head = f"{report.step} on {target.name}: {target.num_devices} devices, mesh {mesh}"
    return [head, *told]


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
    if target.platform == "cuda" and memory.peak > PREALLOCATED * target.memory:
        lines.append(
            f"  JAX takes {PREALLOCATED:.0%} of a GPU's memory unless "
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
    total, again = sum(flops.run.values()), sum(flops.model.values())
    repeated = (
        f", {1 - again / total:.0%} of it rematerialized" if total > again else ""
    )
    moved = report.timeline.memory_bytes
    lines = [
        "",
        "estimate per step, at the rates of data sheets: no measurement, and a bound",
        _row(
            "matmuls",
            seconds_text(report.compute_seconds),
            f"{_flop_text(total)} at {target.flops / 1e12:.4g} TFLOP/s{repeated}",
        ),
        _row(
            "memory",
            seconds_text(report.memory_seconds),
            f"{size_text(moved)} at {target.memory_bandwidth / 1e9:.4g} GB/s",
        ),
        _row(
            "transfers",
            seconds_text(report.transfer_seconds),
            f"of which {seconds_text(report.exposed_seconds)} exposed",
        ),
        _row("step", seconds_text(report.step_seconds), f"MFU {report.mfu:.0%}"),
    ]
    if not (report.verification.exact and flops.exact):
        lines.append("  loops without a known trip count are counted once")
    return lines


def _row(name: str, value: str, note: str = "") -> str:
    return f"  {name:<26}{value:>10}  {note}".rstrip()


def _flop_text(flops: int) -> str:
    for unit, scale in (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if flops >= scale or unit == "MFLOP":
            return f"{flops / scale:.3g} {unit}"
    raise AssertionError


def seconds_text(seconds: float) -> str:
    """`12.3 ms`, `4.56 s`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale or unit == "us":
            return f"{seconds / scale:.3g} {unit}"
    raise AssertionError
