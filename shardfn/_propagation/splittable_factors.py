"""Which factors of an op a mesh axis may split, and what that does to its values.

In: the op's rule, its avals, and what other mesh axes split already. Out: what the
choice of a factor asks: whether it may be split, along which dimensions, and how it
reduces.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardfn._core.op_sharding_rule import (
    Dim,
    OpShardingRule,
    flat_factor,
    flat_factor_start,
    is_flat_factor,
)
from shardfn._core.program import LITERAL
from shardfn._core.reasons import Note
from shardfn._core.resharding import can_split
from shardfn._core.sharding import (
    Axes,
    Sharding,
    Split,
    axes_of,
    flat,
)
from shardfn._core.sizes import elements
from shardfn._propagation.preferences import Preferences


@dataclass(slots=True)
class SplittableFactors:
    """One op, and how it is split so far.

    A literal is the same in every device's program: unless it is zero, it cannot be one
    term of a sum.

    Attributes:
      rule: its rule.
      operand_avals: avals of its operands.
      result_avals: avals of its results.
      states: shardings of its operands now.
      preferences: those of its results' consumers.
      kinds: whether operands are zeros or literals, as in `Node.kinds`.
      axes: the mesh axes.
      small: unreduced values with fewer elements are reduced as late as possible.
      free: whether each operand is made of scalars and constants alone.
      sources: the least bytes of what each operand is made of alone, such as of what it
        is a broadcast of; empty where no leaf is stationary.
      operands: shardings that it needs its operands in, as far as they are chosen.
      results: those that it makes its results in.
      parts: `(factor, mesh axis index)` for every factor that is split.
      notes: the thresholds that decided.
    """

    rule: OpShardingRule
    operand_avals: Sequence[Any]
    result_avals: Sequence[Any]
    states: Sequence[Sharding]
    preferences: Sequence[Preferences]
    kinds: Sequence[str]
    axes: Axes
    small: int
    free: Sequence[bool]
    sources: Sequence[int] = ()
    operands: list[Sharding] = field(default_factory=list)
    results: list[Sharding] = field(default_factory=list)
    parts: list[tuple[str, int]] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def factor(self, dims: Any, dim: int) -> str | None:
        if dim < 0:
            return flat_factor(dim) if self.rule.flat else None
        return self.rule.major(dims, dim, self.filled)

    @property
    def filled(self) -> frozenset[str]:
        return filled_factors(self.rule, self.parts, self.axes)

    def reduces(self, factor: str) -> bool:
        if is_flat_factor(factor):
            return bool(self.rule.reduce)
        return self.rule.reducer(factor) is not None

    def can_part(self, axis: int, factor: str, stored: bool) -> bool:
        """Whether `axis` may split `factor`, given what other axes already split."""
        count = self.axes.sizes[axis]
        if count == 1:
            return False
        if is_flat_factor(factor):
            return stored and not self.parts and self.can_part_flat(factor)
        if self.splits_runs_of(factor):
            return False
        flattened = any(is_flat_factor(f) for f, _ in self.parts)
        if flattened or not self.rule.is_splittable(factor, self.filled):
            return False
        parts = math.prod(self.axes.sizes[a] for f, a in self.parts if f == factor)
        size = self.rule.size(factor)
        if size // (parts * count) < dict(self.rule.blocks).get(factor, 0):
            return False
        partners = self.additive_partners(factor)
        if any(self.kinds[i] == LITERAL for i in partners):
            return False
        if size == 0 or size % (parts * count):
            padded = stored and parts == 1 and self.rule.stands_alone(factor)
            if not padded or not size:
                return False
        return all(
            can_split(aval.shape, sharding, axis, Split(dim, stored), self.axes)
            for dims, aval, sharding in self.sides()
            if (dim := self.rule.dim_of(dims, factor)) is not None
        )

    def splits_runs_of(self, factor: str) -> bool:
        """Whether a more major axis splits a factor that is minor to this one in some
        dimension: blocks of both would be no block, nor one of each run."""
        split = {f for f, _ in self.parts}
        return any(
            not split.isdisjoint(dim[dim.index(factor) + 1 :])
            for dims, _, _ in self.sides()
            for dim in dims
            if factor in dim
        )

    def part_together(self, axis: int, i: int, factor: str | None) -> bool:
        """Whether `axis` and the minor axes that split a dimension of operand `i` with
        it may all split `factor`, or what is left of it until it is split down to
        single elements. If only some may, the others would have to gather."""
        state = self.states[i][axis]
        if factor is None or not isinstance(state, Split) or is_flat_factor(factor):
            return True
        parts = (self.axes.sizes[a] for f, a in self.parts if f == factor)
        left = self.rule.size(factor) // math.prod(parts)
        for minor in axes_of(self.states[i], state.dim):
            count = self.axes.sizes[minor]
            if minor < axis or left == 1:
                continue
            if left % count:
                return False
            left //= count
        return True

    def can_part_flat(self, factor: str) -> bool:
        """Whether all values but scalars keep the dimensions in front of the flat
        ones."""
        start = flat_factor_start(factor)
        leading = {
            dims[:start] if len(dims) > start else None
            for dims, aval, _ in self.sides()
            if dims
        }
        sizes = all(elements(aval) > 0 for _, aval, _ in self.sides())
        return sizes and len(leading) == 1 and None not in leading

    def sides(self) -> list[tuple[Any, Any, Sharding]]:
        return [
            *zip(self.rule.operands, self.operand_avals, self.operands, strict=True),
            *zip(self.rule.results, self.result_avals, self.results, strict=True),
        ]

    def run_factor(self, axis: int, i: int, split: Split) -> str | None:
        """The factor of equal runs, such as the rows of each microbatch, that `axis`
        may split instead of the runs themselves, which are too few."""
        if not self.may_regroup(i, split):
            return None
        dims = self.rule.operands[i][split.dim]
        factors = self.lasting(dims)
        if len(factors) != 2 or factors[1] in self.rule.whole:
            return None
        (result,), (preferences,), minor = (
            self.rule.results,
            self.preferences,
            factors[1],
        )
        at = self.rule.dim_of(result, minor)
        leads = at is not None and self.rule.major(result, at) == minor
        divides = self.all_divide(i, split, minor)
        preferred = preferences[axis] != frozenset({None})
        return minor if leads and divides and preferred else None

    def joined_factor(self, axis: int, i: int, split: Split) -> str | None:
        """The factor of rows in equal runs that are joined, which `axis` may split
        though the runs, which lead in the result, are too few."""
        if not self.may_regroup(i, split):
            return None
        factors = self.lasting(self.rule.operands[i][split.dim])
        if len(factors) != 1 or factors[0] in self.rule.whole:
            return None
        (result,), (preferences,) = self.rule.results, self.preferences
        at = self.rule.dim_of(result, factors[0])
        joins = at is not None and len(self.lasting(result[at])) == 2
        divides = self.all_divide(i, split, factors[0])
        preferred = preferences[axis] != frozenset({None})
        return factors[0] if joins and divides and preferred else None

    def laid_out_with(self, factor: str) -> set[str]:
        """The factors that share dimensions with this one, as rows and their parts do
        where they are laid out anew; not those of features."""
        dims = [dim for dims, _, _ in self.sides() for dim in dims]
        found, more = {factor}, True
        while more:
            near = {f for dim in dims if not found.isdisjoint(dim) for f in dim}
            more = not near <= found
            found |= near
        return found

    def may_regroup(self, i: int, split: Split) -> bool:
        """Whether the op may run on blocks of runs of operand `i`."""
        if not self.rule.regroups or split.stored or split.dim < 0:
            return False
        return isinstance(self.operand_avals[i].dtype, np.dtype)

    def all_divide(self, i: int, split: Split, factor: str) -> bool:
        """Whether all axes that split a dimension of operand `i` together divide a
        factor, and no axis splits another one."""
        together = axes_of(self.states[i], split.dim)
        count = math.prod(self.axes.sizes[axis] for axis in together)
        alone = all(f == factor and a in together for f, a in self.parts)
        return alone and self.rule.size(factor) % count == 0

    def lasting(self, dim: Dim) -> list[str]:
        """The factors of a dimension that have more than one element."""
        return [f for f in dim if self.rule.size(f) > 1]

    def runs(self, dim: Dim, factor: str) -> int:
        """The runs of which each device holds a block of `factor`; 0 if it is major."""
        before = math.prod(self.rule.size(f) for f in dim[: dim.index(factor)])
        filled = any(f in self.filled for f in dim[: dim.index(factor)])
        return before if before > 1 and not filled else 0

    def shift(self, factor: str) -> int:
        """How many rows before its own a block of `factor` has to begin."""
        return dict(self.rule.shifts).get(factor, 0)

    def dim_of(self, dims: Any, factor: str) -> int | None:
        if is_flat_factor(factor):
            return flat(flat_factor_start(factor)) if dims else None
        return self.rule.dim_of(dims, factor)

    def reducer(self, factor: str) -> str:
        pairs = dict(self.rule.reduce)
        return next(iter(pairs.values())) if is_flat_factor(factor) else pairs[factor]

    def additive_partners(self, factor: str) -> set[int]:
        """Operands added to a sum over `factor` that do not have it themselves."""
        if not self.reduces(factor):
            return set()
        dims = enumerate(self.rule.operands)
        having = {i for i, d in dims if self.dim_of(d, factor) is not None}
        partners: set[int] = set()
        for group in self.rule.linear:
            if len(group) > 1 and group.intersection(having):
                partners |= group.difference(having)
        return partners


def filled_factors(
    rule: OpShardingRule, parts: Sequence[tuple[str, int]], axes: Axes
) -> frozenset[str]:
    """The factors that `parts` split down to single elements."""
    if not parts:
        return frozenset()
    counts: dict[str, int] = {}
    for factor, axis in parts:
        counts[factor] = counts.get(factor, 1) * axes.sizes[axis]
    return frozenset(
        f for f, n in counts.items() if not is_flat_factor(f) and rule.size(f) == n
    )
