"""What a step took by kind of kernel, predicted and as a profiler saw it.

In: a compiled program, its rates, a trace. Out: seconds of matmuls, of attention
scores, of the rest, and of nothing.
"""

import re
from collections import Counter
from collections.abc import Mapping

import jax
from criteria_models import SCORES

from shardfn.analysis._data_sheets import Target
from shardfn.analysis._hlo.parse import parse_module
from shardfn.analysis._hlo.play import play
from shardfn.analysis._hlo.timeline import MATMUL, Rates, Timeline
from shardfn.analysis._latency import KERNEL_GAP, TransferTime

REST, IDLE = "rest", "idle"
KINDS = MATMUL, SCORES, REST, IDLE
LIBRARIES = re.compile("nvjet|gemm|cutlass|cublas|cudnn|xmma")
"""In the names of kernels that multiply matrices."""
COMPUTE = "Compute"
"""In the name of the stream that runs kernels; others copy what would be sent."""

Kernels = Mapping[str, tuple[int, int]]
"""By the name of a kernel how often it ran, and for how many nanoseconds in all."""


def without_links(target: Target) -> Rates:
    """A machine's rates, on which transfers take no time."""
    return Rates(
        target.matmul_rate,
        target.memory_bandwidth,
        lambda together: TransferTime(0.0, 0.0),
        target.host_bandwidth,
        KERNEL_GAP[target.platform],
    )


def predicted(text: str, rates: Rates) -> tuple[Timeline, dict[str, float]]:
    """A program, played, and its seconds by kind."""
    timeline, found = play(text, rates), Counter[str]()
    for span in timeline.device:
        kind = SCORES if SCORES in span.op_name else REST
        found[MATMUL if span.kind == MATMUL else kind] += span.end - span.start
    return timeline, dict(found)


def measured(text: str, kernels: Kernels, span: float) -> dict[str, float]:
    """The seconds of a traced step by kind.

    Args:
      text: the program; XLA names kernels after its instructions.
      kernels: what its compute stream ran.
      span: nanoseconds from the first start to the last end.
    """
    module = parse_module(text)
    scopes = {
        re.sub(r"\W", "_", instr.name): instr.op_name
        for comp in module.computations.values()
        for instr in comp.instructions.values()
    }
    found: Counter[str] = Counter()
    for name, (_, nanoseconds) in kernels.items():
        kind = SCORES if SCORES in scopes.get(name, "") else REST
        found[MATMUL if LIBRARIES.search(name) else kind] += nanoseconds
    found[IDLE] = max(0, int(span) - sum(found.values()))
    return {kind: found[kind] / 1e9 for kind in KINDS}


def compute_stream(data: jax.profiler.ProfileData) -> tuple[Kernels, float]:
    """The kernels of a trace's compute stream, and how long it took in nanoseconds."""
    [lines] = [
        [line for line in plane.lines if COMPUTE in line.name]
        for plane in data.planes
        if "/device:" in plane.name
    ]
    kernels: dict[str, tuple[int, int]] = {}
    events = [event for line in lines for event in line.events]
    for event in events:
        count, total = kernels.get(event.name, (0, 0))
        kernels[event.name] = count + 1, total + int(event.duration_ns)
    first = min(event.start_ns for event in events)
    return kernels, max(e.start_ns + e.duration_ns for e in events) - first
