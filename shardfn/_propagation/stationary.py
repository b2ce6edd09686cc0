"""Which factor an op splits where a leaf of the state is stationary: the smaller moves.

In: an op along one mesh axis, one of its operands or what is preferred of its results
split like a stationary leaf. Out: the factor for which least is moved: activations, or
terms of a sum, in front of the leaf and behind it. Leaves themselves move only where no
factor lets them stay.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardfn._core.limits import JOINED_BYTES
from shardfn._core.op_sharding_rule import OpShardingRule
from shardfn._core.program import ZERO, Program
from shardfn._core.sharding import (
    Axes,
    AxisSharding,
    Sharding,
    Split,
    Unreduced,
    stored_shape,
)
from shardfn._core.sizes import elements, nbytes
from shardfn._propagation.preferences import Preferences


def can_stay(sharding: Sharding) -> bool:
    """Whether a leaf that is stored so can be stationary: it is split, and not
    flattened. One that is padded stays where its rows are looked up, or updated."""
    splits = [split for split in sharding if isinstance(split, Split)]
    return bool(splits) and all(split.stored and split.dim >= 0 for split in splits)


def is_padded(aval: Any, sharding: Sharding, axes: Axes) -> bool:
    """Whether a value that is split so has more elements, of no meaning."""
    shape = tuple(getattr(aval, "shape", ()))
    return stored_shape(shape, sharding, axes) != shape


def stationary(sharding: Sharding) -> Sharding:
    """The sharding of a leaf that stays as it is stored."""
    return tuple(
        replace(s, stationary=True) if isinstance(s, Split) else s for s in sharding
    )


def gathers_stack(state: Sharding, others: Sequence[Sharding], aval: Any) -> bool:
    """Whether a stack of which a loop takes one leaf after the other is gathered at
    once: it is small, and moves beside leaves that are stationary."""
    moves = [s for s in state if isinstance(s, Split)]
    return (
        bool(moves)
        and all(s.stored and not s.stationary for s in moves)
        and nbytes(aval) <= JOINED_BYTES
        and any(_is_leaf(s) for each in others for s in each)
    )


def least_sources(program: Program) -> dict[int, int]:
    """The least bytes of what each value is made of alone: of a broadcast, those of
    what it repeats, which can be moved in its place; of constants none, which can be
    made anywhere."""
    least = {value: nbytes(aval) for value, aval in enumerate(program.avals)}
    for node in program.nodes:
        given = [atom for atom in node.inputs if isinstance(atom, int)]
        if node.kind == "op" and len(given) < 2 and not node.eqn.effects:
            source = least[given[0]] if given else 0
            for value in node.outputs:
                least[value] = min(least[value], source)
    return least


Moved = tuple[int, float]
"""How many stationary leaves and their gradients move, and bytes of all that does."""


def meets_stationary(
    axis: int, states: Sequence[Sharding], preferences: Sequence[Preferences]
) -> bool:
    """Whether an operand is split like a stationary leaf, or a result is to be."""
    return is_stationary(axis, states) or any(
        _is_stationary(split) for each in preferences for split in each[axis]
    )


def is_stationary(axis: int, states: Sequence[Sharding]) -> bool:
    """Whether an operand is split like a stationary leaf."""
    return any(_is_stationary(state[axis]) for state in states)


def _is_stationary(state: AxisSharding) -> bool:
    return isinstance(state, Split) and state.stationary


def _is_leaf(state: AxisSharding) -> bool:
    return isinstance(state, Split) and state.stationary and state.stored


@dataclass(frozen=True, slots=True)
class Meeting:
    """An op along one mesh axis.

    Attributes:
      rule: its rule.
      operand_avals: avals of its operands.
      result_avals: avals of its results.
      kinds: whether they are zeros, as in `Node.kinds`.
      sources: the least bytes of what each is made of alone.
      states: how the axis splits each operand now.
      preferred: what is preferred of each result.
      count: devices along the axis.
      factor_of: the factor that a split of a dimension splits, or None.
      dim_of: the dimension of an operand or a result in which a factor stands.
      can_part: whether a factor can be split, and whether as a stored one.
    """

    rule: OpShardingRule
    operand_avals: Sequence[Any]
    result_avals: Sequence[Any]
    kinds: Sequence[str]
    sources: Sequence[int]
    states: Sequence[AxisSharding]
    preferred: Sequence[frozenset[Split | None]]
    count: int
    factor_of: Callable[[Any, int], str | None]
    dim_of: Callable[[Any, str], int | None]
    can_part: Callable[[str, bool], bool]

    def choose(self) -> tuple[str, Split] | None:
        """The factor for which least is moved, and a split of its origin; None: none is
        split. Of two for which as much is moved, the one that consumers prefer."""
        splits = [
            *zip(self.rule.operands, self.states, strict=True),
            *(
                (dims, split)
                for dims, preferred in zip(
                    self.rule.results, self.preferred, strict=True
                )
                for split in sorted(preferred, key=repr)
            ),
        ]
        factors: dict[str, list[Split]] = {}
        for dims, split in splits:
            if isinstance(split, Split):
                factor = self.factor_of(dims, split.dim)
                if factor is not None:
                    factors.setdefault(factor, []).append(split)
        for factor in self.free():
            factors.setdefault(factor, [])
        stored = {
            factor: self.is_stored(each) or self.is_row_of_leaf(factor)
            for factor, each in factors.items()
        }
        able = [f for f in factors if self.can_part(f, stored[f])]

        def cost(factor: str | None) -> tuple[Moved, bool, bool]:
            return self.moved(factor), not self.is_preferred(factor), factor is None

        best = min([*able, None], key=cost)
        if best is None:
            return None
        stays = any(split.stationary for split in factors[best])
        return best, Split(0, stored[best], stationary=stays)

    def free(self) -> Iterator[str]:
        """The factors of results, which need be split of no operand yet: rows that are
        sent to experts in an order of their own are exchanged for all rows' parts."""
        for dims in self.rule.results:
            for dim in range(len(dims)):
                factor = self.factor_of(dims, dim)
                if factor is not None:
                    yield factor

    def is_stored(self, splits: Sequence[Split]) -> bool:
        """Whether what has one of these splits belongs to a leaf: all operands do, or
        the op goes element by element and one does, as in an update."""
        operands = [
            (dims, state)
            for dims, state, aval in zip(
                self.rule.operands, self.states, self.operand_avals, strict=True
            )
            if elements(aval) > 1
        ]
        if not operands:
            return False
        if all(isinstance(s, Split) and s.stored for _, s in operands):
            return True
        alike = {dims for dims, _ in operands} | {*self.rule.results}
        return len(alike) == 1 and any(map(_is_leaf, splits))

    def is_row_of_leaf(self, factor: str) -> bool:
        """Whether `factor` are rows of a leaf that its devices do not divide, and of
        these some are read, or written in place: a block may have padding then, as the
        leaf's has."""
        if not self.rule.size(factor) % self.count:
            return False
        if factor == self.rule.owned:
            return True
        sides = [
            (dims, state, self.dim_of(dims, factor))
            for dims, state in zip(self.rule.operands, self.states, strict=True)
        ]
        whose = [(dims, state, dim) for dims, state, dim in sides if dim is not None]
        belongs = all(
            state is None
            or (isinstance(state, Split) and _is_leaf(state) and state.dim == dim)
            for _, state, dim in whose
        )
        made = [d for d in self.rule.results if self.dim_of(d, factor) is not None]
        picks = self.rule.picks and self.rule.reducer(factor) is not None
        written = bool(made) and all(d in [dims for dims, *_ in whose] for d in made)
        return belongs and (picks if not made else written)

    def is_preferred(self, factor: str | None) -> bool:
        """Whether a consumer prefers a result split so."""
        return factor is not None and any(
            split is not None and split.dim == self.dim_of(dims, factor)
            for dims, preferred in zip(self.rule.results, self.preferred, strict=True)
            for split in preferred
        )

    def moved(self, factor: str | None) -> Moved:
        """What moves if `factor` is split."""
        leaves, others = 0, 0.0
        for aval, kind, source, state, dims in zip(
            self.operand_avals,
            self.kinds,
            self.sources,
            self.states,
            self.rule.operands,
            strict=True,
        ):
            if kind == ZERO:  # made where it is used
                continue
            size = min(self.operand(aval, state, dims, factor), source)
            leaves += _is_leaf(state) and size > 0
            others += size
        for aval, preferred, dims in zip(
            self.result_avals, self.preferred, self.rule.results, strict=True
        ):
            size = self.result(aval, preferred, dims, factor)
            leaves += size > 0 and any(map(_is_leaf, preferred))
            others += size
        return leaves, others

    def operand(
        self, aval: Any, state: AxisSharding, dims: Any, factor: str | None
    ) -> float:
        """Bytes that an operand of sharding `state` is moved in."""
        if state is None:
            return 0
        dim = None if factor is None else self.dim_of(dims, factor)
        if isinstance(state, Unreduced):
            return nbytes(aval) * (1 if dim is not None else 2)
        if dim == state.dim:
            return 0
        return nbytes(aval) / (1 if dim is None else self.count)

    def result(
        self,
        aval: Any,
        preferred: frozenset[Split | None],
        dims: Any,
        factor: str | None,
    ) -> float:
        """Bytes that a result is moved in to where its consumers take it."""
        if factor is None:
            return 0
        splits = [split for split in preferred if split is not None]
        dim = self.dim_of(dims, factor)
        if dim is None:
            return nbytes(aval) * (1 if splits else 2)
        if not preferred or any(split.dim == dim for split in splits):
            return 0
        return nbytes(aval) / (self.count if splits else 1)
