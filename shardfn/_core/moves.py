"""Moves: what takes a value from one sharding to the next on a path.

In: two shardings that differ on one mesh axis. Out: a `Move`, a frozen value that knows
what each device sends, when a path may take it, whom it may join, and which collective
it compiles to. A new move is a class here, with a case in `move_of`, and its lowering
in `_lowering.collectives`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from shardfn._core.sharding import (
    Axes,
    AxisSharding,
    Sharding,
    Split,
    Unreduced,
    along,
    axes_of,
    local_shape,
    on_axis,
    stored_shape,
)


@dataclass(frozen=True, slots=True)
class Move:
    """A move between neighbours of a path.

    Attributes:
      before: the sharding it starts from.
      after: the one it ends in.
      axis: index of the mesh axis in which they differ.

    Of the class:
      name: what the move is called.
      op: the collective in plans, in JAX's words; "" if nothing is sent.
      hlo_ops: the opcodes of that collective in compiled programs.
      joins: whether moves of several values can be one collective.
      sums: whether the collective reduces terms.
      trips: how often a ring over the devices sends the value.
    """

    before: Sharding
    after: Sharding
    axis: int

    name: ClassVar[str] = ""
    op: ClassVar[str] = ""
    hlo_ops: ClassVar[tuple[str, ...]] = ()
    joins: ClassVar[bool] = False
    sums: ClassVar[bool] = False
    trips: ClassVar[int] = 0

    @property
    def state(self) -> AxisSharding:
        """How the axis splits the value before."""
        return self.before[self.axis]

    @property
    def goal(self) -> AxisSharding:
        """How the axis splits the value after."""
        return self.after[self.axis]

    @property
    def communicates(self) -> bool:
        """Whether devices talk to each other."""
        return bool(self.op)

    @property
    def reduces(self) -> str:
        """What the collective reduces terms by; "" if it does not reduce."""
        return self.state.op if self.sums and isinstance(self.state, Unreduced) else ""

    def fits(self, shape: Sequence[int], axes: Axes) -> bool:
        """Whether a path may take it with a value of global `shape`; the way around is
        by a whole value."""
        return True

    @classmethod
    def arrivals(cls, goal: Split, size: int) -> tuple[Split, ...]:
        """The splits to go through, `goal` the last, from blocks of `size` rows to such
        a goal as this kind of move alone reaches; none to others."""
        return ()

    def devices(self, shape: Sequence[int], axes: Axes) -> int:
        """How many devices talk to each other about a value of global `shape`."""
        return min(
            along(self.before, self.axis, axes), along(self.after, self.axis, axes)
        )

    def elements(self, shape: Sequence[int], axes: Axes) -> int:
        """Elements of the larger side on one device, padding included, of a value of
        global `shape`."""
        return math.prod(local_shape(shape, self.before, axes))

    def wire_elements(self, shape: Sequence[int], axes: Axes) -> float:
        """Elements that each device sends, by a ring over the devices."""
        n = self.devices(shape, axes)
        return self.trips * self.elements(shape, axes) * (n - 1) / n


class AllGather(Move):
    """A split value becomes whole."""

    name = op = "all_gather"
    hlo_ops = ("all-gather",)
    joins = True
    trips = 1

    def elements(self, shape: Sequence[int], axes: Axes) -> int:
        n = along(self.before, self.axis, axes)
        return math.prod(local_shape(shape, self.before, axes)) * n


class ReduceScatter(Move):
    """Terms are summed, and each device keeps its part of the sum."""

    name = op = "psum_scatter"
    hlo_ops = ("reduce-scatter",)
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


class AllReduce(Move):
    """Terms are reduced, and each device has the whole result."""

    name = op = "all_reduce"
    hlo_ops = ("all-reduce",)
    joins = sums = True
    trips = 2


class GatherTerms(Move):
    """Terms are gathered and each device reduces them: no collective multiplies."""

    name = "gather_terms"
    op = "all_gather"
    hlo_ops = AllGather.hlo_ops
    trips = 1

    def elements(self, shape: Sequence[int], axes: Axes) -> int:
        return math.prod(local_shape(shape, self.before, axes)) * axes.sizes[self.axis]


class AllToAll(Move):
    """The split of one dimension becomes one of another."""

    name = op = "all_to_all"
    hlo_ops = ("all-to-all", "ragged-all-to-all")
    joins = True
    trips = 1

    def fits(self, shape: Sequence[int], axes: Axes) -> bool:
        """Both dimensions have to be divided, and the first by this axis alone."""
        state, goal = self.state, self.goal
        assert isinstance(state, Split) and isinstance(goal, Split)
        if min(state.dim, goal.dim) < 0:
            return False
        if axes_of(self.before, state.dim) != (self.axis,):
            return False
        count = axes.sizes[self.axis]
        local = local_shape(shape, on_axis(self.before, self.axis, None), axes)
        return shape[state.dim] % count == 0 and local[goal.dim] % count == 0


class Regroup(Move):
    """Blocks of a dimension become blocks of each of its runs, such as microbatches.
    What two devices exchange is padded to be equal."""

    name = "regroup"
    op = "all_to_all"
    hlo_ops = AllToAll.hlo_ops
    trips = 1

    @classmethod
    def arrivals(cls, goal: Split, size: int) -> tuple[Split, ...]:
        return (goal,) if goal.runs else ()

    @property
    def runs(self) -> tuple[int, int]:
        """The dimension, and of how many runs it is."""
        assert isinstance(self.goal, Split)
        return self.goal.dim, self.goal.runs

    def elements(self, shape: Sequence[int], axes: Axes) -> int:
        (_, runs), n = self.runs, axes.sizes[self.axis]
        local = math.prod(local_shape(shape, self.before, axes))
        return local // runs * -(-runs // n) * n


class Permute(Move):
    """Blocks move on along the axis: whole ones to other devices, or some rows of each
    to a neighbour."""

    name = op = "ppermute"
    hlo_ops = ("collective-permute",)
    trips = 1

    @classmethod
    def arrivals(cls, goal: Split, size: int) -> tuple[Split, ...]:
        """First by whole blocks, then by the rows that are left."""
        blocks = replace(goal, shift=round(goal.shift / size) * size)
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
        return axes.sizes[self.axis] // math.gcd(blocks or 1, axes.sizes[self.axis])

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
    AllReduce,
    GatherTerms,
    AllToAll,
    Regroup,
    Permute,
    Slice,
    Mask,
    Relabel,
)


def move_of(before: Sharding, after: Sharding) -> Move:
    """The move between two neighbours of a path."""
    axis = next(a for a, (b, c) in enumerate(zip(before, after, strict=True)) if b != c)
    state, goal = before[axis], after[axis]
    match state, goal:
        case Unreduced(), Split():
            kind = ReduceScatter
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
    return kind(before, after, axis)


def moves_of(path: Sequence[Sharding]) -> list[Move]:
    """The moves along a path."""
    return [move_of(a, b) for a, b in zip(path, path[1:], strict=False)]
