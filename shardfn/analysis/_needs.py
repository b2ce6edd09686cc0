"""What is matched: lines of a plan, and collectives of a compiled program.

In: one of each. Out: how often the line is still to be found, and what the collective
would be for it.
"""

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace

import jax.numpy as jnp
import numpy as np

from shardfn._core.moves import AllReduce, Permute
from shardfn._core.quantized import SCALE_BITS
from shardfn._core.reading_limits import SAME_SIZE
from shardfn._core.sharding import Axes
from shardfn._core.sizes import is_key_name, key_word
from shardfn.analysis._hlo import HloCollective
from shardfn.analysis._line_check import (
    ALL_REDUCED,
    NARROWED,
    PRESENT,
    REWRITTEN,
    WIDENED,
)
from shardfn.analysis.collective import Collective

Partition = frozenset[frozenset[int]]
"""Sets of devices that talk to each other, by their numbers in mesh order."""


@dataclass(slots=True)
class Need:
    """A line of the plan, and the runs of it that are still to be found.

    Attributes:
      line: the line.
      devices: how many talk to each other.
      runs: how often it is still to be found.
      over: who they may be; empty where only their number is known.
      found: what was found for it.
      status: what that is for it.
    """

    line: Collective
    devices: int
    runs: int
    over: frozenset[Partition] = frozenset()
    found: list[HloCollective] = field(default_factory=list)
    status: set[str] = field(default_factory=set)

    @property
    def key(self) -> Hashable:
        return self.line.elements, self.devices

    @property
    def is_uncounted(self) -> bool:
        """Whether its plan cannot know how often it runs. A compiler may."""
        return self.line.times is None

    @property
    def left_loops(self) -> bool:
        """Whether it was found as often as it would run in front of a loop in which it
        is the same in every iteration."""
        return sum(found.times for found in self.found) in self.line.hoisted

    @property
    def bytes(self) -> float:
        """Bytes of one element."""
        if is_key_name(self.line.dtype):
            return key_word()
        return jnp.dtype(self.line.dtype).itemsize


@dataclass(slots=True)
class Supply:
    """A compiled collective, and the runs of it that no line has claimed yet."""

    collective: HloCollective
    names: frozenset[str]
    runs: int

    @property
    def keys(self) -> list[Hashable]:
        """Those of the lines that it may be for; two elements of 16 bits may be one."""
        found = self.collective
        counts = [found.elements, *[2 * found.elements] * (found.dtype == "uint32")]
        return [(count, found.group_size) for count in counts]


def need_of(line: Collective, axes: Axes) -> Need:
    return Need(line, line.devices, line.each, _talking(line, axes))


def _talking(line: Collective, axes: Axes) -> frozenset[Partition]:
    """Who may talk to each other for a line: all devices along its axes, or neighbours
    there, or the first of each group of neighbours, and so on. Cycles of permutes are
    known by their length only."""
    if line.op == Permute.op or not axes.mesh:
        return frozenset()
    over = line.axis.split(",")
    names, sizes = zip(*axes.mesh, strict=True)
    apart = [i for i, name in enumerate(names) if name not in over]
    along = [i for i, name in enumerate(names) if name in over]
    ids = np.arange(math.prod(sizes)).reshape(sizes).transpose(apart + along)
    count, size = line.devices, math.prod(sizes[i] for i in along)
    if size % count:
        return frozenset()
    near = ids.reshape(-1, count)
    spread = ids.reshape(-1, count, size // count).swapaxes(1, 2).reshape(-1, count)
    return frozenset({_partition(near), _partition(spread)})


def _partition(groups: Iterable[Iterable[int]]) -> Partition:
    return frozenset(frozenset(int(d) for d in group) for group in groups)


def is_between(need: Need, found: HloCollective) -> bool:
    """Whether the same devices talk to each other, as far as it is known."""
    if need.devices != found.group_size:
        return False
    return not need.over or _partition(found.groups) in need.over


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


def elements_of(need: Need, found: HloCollective) -> int:
    """Elements that it moves, of the line's: those of 16 bits may move in pairs (see
    `_lowering.reshards`)."""
    pairs = need.bytes == 2 and found.dtype == "uint32"
    return (
        2 if pairs and need.line.elements == 2 * found.elements else 1
    ) * found.elements


def status_of(need: Need, found: HloCollective) -> str:
    elements = elements_of(need, found)
    if need.line.elements != elements or not is_between(need, found):
        return REWRITTEN
    if not is_op(need, found):
        return ALL_REDUCED if sums_whole(found) else REWRITTEN
    if has_width(need, found):
        return PRESENT
    return WIDENED if _width(need, found) > need.bytes else NARROWED


def has_width(need: Need, found: HloCollective) -> bool:
    """Whether its elements take as many bytes as the line's."""
    size = _width(need, found)
    return abs(size - need.bytes) < SAME_SIZE * size


def _width(need: Need, found: HloCollective) -> float:
    """Bytes of an element of the line's, as it moves."""
    elements = elements_of(need, found)
    return found.bytes / elements if elements else need.bytes
