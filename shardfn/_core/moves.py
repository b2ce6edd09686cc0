"""Moves: what takes a value from one sharding to the next on a path.

In: two shardings that differ on one mesh axis, or in a shift over several. Out: a
`Move`, a frozen value that knows what each device sends, when a path may take it, whom
it may join, and which collective it compiles to. A new move is a class here, with a
case in `move_of`, and its lowering in `_lowering.collectives`.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from shardfn._core.limits import REGROUP_PERMUTES
from shardfn._core.move import Message, Move as Move
from shardfn._core.quantized import Quantized
from shardfn._core.regrouping import Regrouping
from shardfn._core.sharding import (
    Axes,
    Sharding,
    Split,
    Unreduced,
    along,
    axes_of,
    local_shape,
    on_axis,
    stored_shape,
)


class AllGather(Move):
    """A split value becomes whole."""

    name = op = "all_gather"
    hlo_ops = ("all-gather",)
    outcome = "it is gathered"
    joins = packs = True
    trips = 1

    def elements(self, shape: Sequence[int], axes: Axes) -> int:
        n = along(self.before, self.axis, axes)
        return math.prod(local_shape(shape, self.before, axes)) * n


class ReduceScatter(Move):
    """Terms are summed, and each device keeps its part of the sum."""

    name = op = "psum_scatter"
    hlo_ops = ("reduce-scatter",)
    outcome = "its terms are reduce-scattered"
    joins = sums = True
    trips = 1

    def fits(self, shape: Sequence[int], axes: Axes) -> bool:
        return self.reduces == "sum"

    def elements(self, shape: Sequence[int], axes: Axes) -> int:
        parts = math.prod(
            axes.sizes[a]
            for a, s in enumerate(self.after)
            if isinstance(s, Split) and a != self.axis
        )
        return math.prod(stored_shape(shape, self.after, axes)) // parts


class ExchangeTerms(ReduceScatter):
    """The same where terms are quantized: no collective sums these. Each device gets
    the others' terms of its part, and sums them in float32."""

    name = "exchange_terms"
    op = "all_to_all"
    hlo_ops = ("all-to-all", "ragged-all-to-all")
    sums = False


class AllReduce(Move):
    """Terms are reduced, and each device has the whole result."""

    name = op = "all_reduce"
    hlo_ops = ("all-reduce",)
    outcome = "its terms are all-reduced"
    joins = sums = True
    trips = 2


class GatherTerms(Move):
    """Terms are gathered and each device reduces them: no collective multiplies."""

    name = "gather_terms"
    op = "all_gather"
    hlo_ops = AllGather.hlo_ops
    outcome = "its terms are gathered"
    trips = 1

    def elements(self, shape: Sequence[int], axes: Axes) -> int:
        return math.prod(local_shape(shape, self.before, axes)) * axes.sizes[self.axis]


class AllToAll(Move):
    """The split of one dimension becomes one of another, along all axes that split it
    together."""

    name = op = "all_to_all"
    hlo_ops = ("all-to-all", "ragged-all-to-all")
    outcome = "it is exchanged"
    joins = True
    trips = 1

    def fits(self, shape: Sequence[int], axes: Axes) -> bool:
        """Both dimensions have to be divided, the first by these axes alone. Along one
        axis, which then splits a dimension alone, blocks may be padded."""
        state, goal = self.state, self.goal
        assert isinstance(state, Split) and isinstance(goal, Split)
        if min(state.dim, goal.dim) < 0:
            return False
        if axes_of(self.before, state.dim) != self.over:
            return False
        count, size = self.devices(shape, axes), self.taken(shape, axes)
        alone = len(self.over) == 1
        pads = alone and size == shape[goal.dim]
        return (alone or shape[state.dim] % count == 0) and (pads or size % count == 0)

    def taken(self, shape: Sequence[int], axes: Axes) -> int:
        """What a device has of the dimension that is to be split."""
        assert isinstance(self.goal, Split)
        whole = self.before
        for axis in self.over:
            whole = on_axis(whole, axis, None)
        return local_shape(shape, whole, axes)[self.goal.dim]

    def elements(self, shape: Sequence[int], axes: Axes) -> int:
        """Of a block whose parts are padded to be alike."""
        count, size = self.devices(shape, axes), self.taken(shape, axes)
        block = math.prod(local_shape(shape, self.before, axes))
        return block // max(size, 1) * -(-size // count) * count

    def devices(self, shape: Sequence[int], axes: Axes) -> int:
        return math.prod(along(self.before, axis, axes) for axis in self.over)


class Regroup(Move):
    """Blocks of a dimension become blocks of each of its runs, such as microbatches, or
    these become blocks again, by an all-to-all, and permutes of what that would pad:
    see `regrouping`."""

    name = "regroup"
    op = "all_to_all"
    hlo_ops = AllToAll.hlo_ops
    outcome = (
        "it is exchanged by an all-to-all, or parts of it by at most "
        f"{REGROUP_PERMUTES} permutes (limits.REGROUP_PERMUTES)"
    )
    trips = 1

    @classmethod
    def arrivals(cls, goal: Split, size: int) -> tuple[Split, ...]:
        return (goal,) if goal.runs else ()

    @property
    def dim(self) -> int:
        """The dimension that is regrouped."""
        assert isinstance(self.goal, Split)
        return self.goal.dim

    @property
    def back(self) -> bool:
        """Whether blocks of each run become blocks of the dimension."""
        assert isinstance(self.goal, Split)
        return not self.goal.runs

    def units(self, axes: Axes) -> Regrouping:
        """Who sends what to whom; the other way round, if it goes back."""
        assert isinstance(self.state, Split) and isinstance(self.goal, Split)
        runs = self.goal.runs or self.state.runs
        return Regrouping(runs, math.prod(axes.sizes[axis] for axis in self.over))

    def messages(self, shape: Sequence[int], axes: Axes) -> tuple[Message, ...]:
        units = self.units(axes)
        n = units.devices
        unit = math.prod(local_shape(shape, self.before, axes)) // units.runs
        exchanged = unit * units.exchanged * n
        found = [Message(self.op, exchanged, n, exchanged * (n - 1) / n)]
        for cycle, times in sorted(units.cycles().items()):
            found.append(Message(Permute.op, unit, cycle, unit, times))
        return tuple(m for m in found if m.elements)

    def elements(self, shape: Sequence[int], axes: Axes) -> int:
        return sum(m.elements * m.times for m in self.messages(shape, axes))

    def wire_elements(self, shape: Sequence[int], axes: Axes) -> float:
        return sum(m.sent * m.times for m in self.messages(shape, axes))


class Permute(Move):
    """Blocks move on along all axes that split the dimension: whole ones to other
    devices, or some rows of each to a neighbour."""

    name = op = "ppermute"
    hlo_ops = ("collective-permute",)
    outcome = "it is passed on"
    trips = 1

    @classmethod
    def arrivals(cls, goal: Split, size: int) -> tuple[Split, ...]:
        """First by whole blocks, then by the rows that are left, forward or back; by
        less than a block at once."""
        count = round(goal.shift / size) if abs(goal.shift) > size else 0
        blocks = replace(goal, shift=count * size)
        return (blocks, goal) if goal.shift else ()

    def shift(self, shape: Sequence[int], axes: Axes) -> tuple[int, int, int]:
        """The dimension that is shifted, by how many whole blocks or how many rows."""
        state, goal = self.state, self.goal
        assert isinstance(state, Split) and isinstance(goal, Split)
        moved = goal.shift - state.shift
        size = local_shape(shape, self.before, axes)[goal.dim]
        blocks, rows = (0, moved) if moved % size else (moved // size, 0)
        return goal.dim, blocks, rows

    def devices(self, shape: Sequence[int], axes: Axes) -> int:
        """Those of a cycle."""
        _, blocks, _ = self.shift(shape, axes)
        count = math.prod(axes.sizes[axis] for axis in self.over)
        return count // math.gcd(blocks or 1, count)

    def elements(self, shape: Sequence[int], axes: Axes) -> int:
        local = local_shape(shape, self.before, axes)
        dim, _, rows = self.shift(shape, axes)
        return math.prod(local) // local[dim] * (abs(rows) or local[dim])

    def wire_elements(self, shape: Sequence[int], axes: Axes) -> float:
        """All of them go straight to one other device."""
        return self.elements(shape, axes)


class Slice(Move):
    """Each device keeps its part of a whole value."""

    name = "slice"


class Mask(Move):
    """A whole value becomes terms of a sum: itself on one device, zero on others."""

    name = "mask"


class Relabel(Move):
    """The same split, said to come from elsewhere: nothing is done."""

    name = "relabel"


MOVES: tuple[type[Move], ...] = (
    AllGather,
    ReduceScatter,
    ExchangeTerms,
    AllReduce,
    GatherTerms,
    AllToAll,
    Regroup,
    Permute,
    Slice,
    Mask,
    Relabel,
)


Written = Sequence[Quantized | None]
"""How a value is written on the wire over each mesh axis; empty for as it is."""


def move_of(before: Sharding, after: Sharding, written: Written = ()) -> Move:
    """The move between two neighbours of a path."""
    axis = next(a for a, (b, c) in enumerate(zip(before, after, strict=True)) if b != c)
    state, goal = before[axis], after[axis]
    quantized = written[axis] if written else None
    match state, goal:
        case Unreduced(), Split():
            kind = ReduceScatter if quantized is None else ExchangeTerms
        case Unreduced(op="prod"), _:
            kind = GatherTerms
        case Unreduced(), _:
            kind = AllReduce
        case Split(), Split() if state.shift != goal.shift:
            kind = Permute
        case Split(), Split() if state.runs != goal.runs:
            kind = Regroup
        case Split(), Split():
            kind = Relabel if state.dim == goal.dim else AllToAll
        case Split(), _:
            kind = AllGather
        case _, Split():
            kind = Slice
        case _:
            kind = Mask
    may = kind.packs or kind is ExchangeTerms
    return kind(before, after, axis, quantized if may else None)


def moves_of(path: Sequence[Sharding], written: Written = ()) -> list[Move]:
    """The moves along a path."""
    return [move_of(a, b, written) for a, b in zip(path, path[1:], strict=False)]


def scatters_of(moves: Sequence[Move]) -> int:
    """How many moves there are up to the last reduce-scatter, if others follow it, such
    as a sum over replicas; else 0. Compilers delay what follows, not what comes first.
    """
    count = max(
        (i for i, m in enumerate(moves, 1) if isinstance(m, ReduceScatter)), default=0
    )
    return count if count < len(moves) else 0
