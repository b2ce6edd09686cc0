"""What is matched: lines of a plan, and collectives of a compiled program.

In: one of each. Out: how often the line is still to be found, and what the collective
would be for it.
"""

from dataclasses import dataclass, field, replace

import jax.numpy as jnp

from shardfn._core.limits import SAME_SIZE
from shardfn._core.moves import AllReduce
from shardfn._core.quantized import SCALE_BITS
from shardfn.analysis._hlo import HloCollective
from shardfn.analysis._line_check import (
    ALL_REDUCED,
    NARROWED,
    PRESENT,
    REWRITTEN,
    WIDENED,
)
from shardfn.analysis.collective import Collective


@dataclass(slots=True)
class Need:
    """A line of the plan, and the runs of it that are still to be found."""

    line: Collective
    devices: int
    runs: int
    found: list[HloCollective] = field(default_factory=list)
    status: set[str] = field(default_factory=set)

    @property
    def key(self) -> tuple[int, int]:
        return self.line.elements, self.devices

    @property
    def bytes(self) -> float:
        """Bytes of one element."""
        if self.line.dtype.startswith("key<"):
            return self.line.wire_bytes / self.line.elements
        return jnp.dtype(self.line.dtype).itemsize


@dataclass(slots=True)
class Supply:
    """A compiled collective, and the runs of it that no line has claimed yet."""

    collective: HloCollective
    names: frozenset[str]
    runs: int

    @property
    def key(self) -> tuple[int, int]:
        return self.collective.elements, self.collective.group_size


def need_of(line: Collective) -> Need:
    return Need(line, line.devices, 1 if line.times is None else line.times)


def scales_of(line: Collective) -> Collective:
    """The collective of a line's scales, as a line."""
    return replace(line, dtype=SCALE_BITS, elements=line.scales)


OF_BOOLEANS = ("max", "or")
"""What reductions of booleans compile to: a maximum of bytes."""


def sums_whole(found: HloCollective) -> bool:
    """Whether it is an all-reduce that sums, which can stand for a gather, too."""
    return found.op == AllReduce.op and found.reduces == "sum"


def is_op(need: Need, found: HloCollective) -> bool:
    line = need.line
    of_booleans = line.reduces and line.dtype == "bool"
    reducers = OF_BOOLEANS if of_booleans else (line.reduces,)
    return found.op == line.op and found.reduces in reducers


def status_of(need: Need, found: HloCollective) -> str:
    if need.key != (found.elements, found.group_size):
        return REWRITTEN
    if not is_op(need, found):
        return ALL_REDUCED if sums_whole(found) else REWRITTEN
    size = found.bytes / found.elements if found.elements else need.bytes
    if abs(size - need.bytes) < SAME_SIZE * size:
        return PRESENT
    return WIDENED if size > need.bytes else NARROWED
