"""When what would run at best, as values.

In: what `play` saw. Out: spans of time, and what they add up to.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardfn.analysis._hlo.collective import HloCollective
from shardfn.analysis._latency import TransferTime

MATMUL, OTHER, WAIT, HOST_WAIT = "matmul", "other", "wait", "host_wait"


@dataclass(frozen=True, slots=True)
class Rates:
    """What a machine does per second.

    Attributes:
      matmul: FLOP/s by operand dtype.
      memory: bytes per second to and from device memory.
      transfer: seconds that the arrays take that one collective moves.
      host: bytes per second from or to the host's memory.
      gap: seconds between one kernel and the next.
    """

    matmul: Callable[[str], float]
    memory: float
    transfer: Callable[[Sequence[HloCollective]], TransferTime]
    host: float = math.inf
    gap: float = 0.0


@dataclass(frozen=True, slots=True)
class Span:
    """Something that runs from `start` to `end`, in seconds.

    Attributes:
      kind: `matmul`, `other`, `wait` or `host_wait` on the device; the collective's
        `op` on the links; `device` or `host` for copies to there.
      op_name: where in the user's program it comes from.
      bytes: that a transfer sends.
      waits_for: the `op` of the collective that the device waits for.
      alone: of a transfer: nothing else can run on the device meanwhile.
      over: kinds of links that a transfer occupies.
    """

    start: float
    end: float
    kind: str
    op_name: str = ""
    bytes: int = 0
    waits_for: str = ""
    alone: bool = False
    over: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step, played.

    Attributes:
      device: what the device runs, in order.
      links: what moves meanwhile.
      rounds: `(start, end, iteration)` of every iteration of the outermost loops.
      live: `(time, bytes)` of temporary memory, each until the next.
      seconds: until the last operation ends.
      flops: of all matmuls, by operand dtype.
      memory_bytes: read from and written to device memory.
      copies: what moves between the host's memory and the device's.
      kernels: operations that the device runs.
      latency: seconds of all transfers, one by one, beyond their time on the links.
      quantizer_bytes: those of `memory_bytes` that operations move which write or read
        quantized values, and what is fused with that; matmuls are not among them.
      durations: seconds of each kernel, and of each transfer from its start until the
        last byte is there, by the name of the compiled instruction.
    """

    device: tuple[Span, ...]
    links: tuple[Span, ...]
    rounds: tuple[tuple[float, float, int], ...]
    live: tuple[tuple[float, int], ...]
    seconds: float
    flops: Counter[str]
    memory_bytes: int
    copies: tuple[Span, ...] = ()
    kernels: int = 0
    latency: float = 0.0
    quantizer_bytes: int = 0
    durations: tuple[tuple[str, float], ...] = ()

    @property
    def exposed(self) -> float:
        """Seconds that the device waits for transfers."""
        return sum(s.end - s.start for s in self.device if s.kind == WAIT)

    @property
    def exposed_in_any_order(self) -> float:
        """The part of `exposed` that no order within an iteration saves: by so much
        those of the outermost loops send for longer than they compute."""
        busy = [s for s in self.device if s.kind not in (WAIT, HOST_WAIT)]
        computed = _within(busy, self.rounds)
        most = [0.0] * len(computed)
        for kind in {kind for s in self.links for kind in s.over}:
            sent = _within([s for s in self.links if kind in s.over], self.rounds)
            most = [max(pair) for pair in zip(most, sent, strict=True)]
        waited = _within([s for s in self.device if s.kind == WAIT], self.rounds)
        rounds = zip(most, computed, waited, strict=True)
        return sum(
            min(max(0.0, links - device), waits) for links, device, waits in rounds
        )

    @property
    def exposed_by_op(self) -> dict[str, float]:
        """The same by what the device waits for, the longest first."""
        found: Counter[str] = Counter()
        for span in self.device:
            if span.kind == WAIT:
                found[span.waits_for] += span.end - span.start  # pyright: ignore
        return dict(found.most_common())

    @property
    def alone(self) -> tuple[Span, ...]:
        """Transfers that the compiler made synchronous, array by array."""
        return tuple(span for span in self.links if span.alone)

    @property
    def transfers(self) -> float:
        """Seconds of all transfers, one by one."""
        return sum(s.end - s.start for s in self.links) + self.latency

    @property
    def host_exposed(self) -> float:
        """Seconds that the device waits for copies from and to the host."""
        return sum(s.end - s.start for s in self.device if s.kind == HOST_WAIT)

    def copied(self, memory: str) -> int:
        """Bytes that are copied to a memory."""
        return sum(s.bytes for s in self.copies if s.kind == memory)


def _within(
    spans: Sequence[Span], rounds: Sequence[tuple[float, float, int]]
) -> list[float]:
    """Seconds of the spans in each round; both are in order, and none overlap."""
    found, at = list[float](), 0
    for start, end, _ in rounds:
        while at < len(spans) and spans[at].end <= start:
            at += 1
        total, i = 0.0, at
        while i < len(spans) and spans[i].start < end:
            total += min(spans[i].end, end) - max(spans[i].start, start)
            i += 1
        found.append(total)
    return found
