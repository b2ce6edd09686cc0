"""How one equation is sharded: which factor each mesh axis splits.

In: the equation's rule, how its operands are sharded now, what its consumers prefer.
Out: a `Decision`: the shardings it needs its operands in and makes its results in.

One factor per equation and mesh axis; factors of the batch beat factors of the stored
state. That is fully sharded data parallelism: a parameter lacks the batch factor, so it
is gathered; its gradient contracts the batch factor, so it is unreduced. Where an
operand or a result belongs to a stationary leaf, the factor for which least moves beats
the others (`least_moved`).
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from shardfn._core.limits import GROWTH
from shardfn._core.op_sharding_rule import (
    Dim,
    OpShardingRule,
    flat_factor,
    flat_factor_start,
    is_flat_factor,
)
from shardfn._core.plan import BodyPlan
from shardfn._core.program import LITERAL, VALUE, ZERO
from shardfn._core.reasons import Note
from shardfn._core.resharding import can_split
from shardfn._core.sharding import (
    Axes,
    Sharding,
    Split,
    Unreduced,
    flat,
    of_dim,
    on_axis,
)
from shardfn._core.sizes import elements, nbytes
from shardfn._propagation.preferences import Preferences
from shardfn._propagation.stationary import Meeting, meets_stationary

GROWN = Note(
    "propagate",
    f"the result has more than {GROWTH} times the elements of the stored operands, so "
    "these are gathered in its place (limits.GROWTH)",
)


@dataclass(frozen=True, slots=True)
class Decision:
    """How one node runs.

    Attributes:
      operands: shardings it needs its operands in.
      made: shardings of the results as the op makes them.
      results: the same after unreduced results that must not stay so are reduced.
      parts: `(factor, mesh axis index)` for every factor that is split.
      bodies: plans of the bodies of control flow.
      preferences: what control flow prefers its operands in; empty for an op.
      fallback: whether operands are gathered because there is no rule.
      notes: the thresholds that decided, for people; two decisions that differ in
        nothing else are equal.
    """

    operands: tuple[Sharding, ...]
    made: tuple[Sharding, ...]
    results: tuple[Sharding, ...]
    parts: tuple[tuple[str, int], ...] = ()
    bodies: tuple[BodyPlan, ...] = ()
    preferences: tuple[Preferences, ...] = ()
    fallback: bool = False
    notes: tuple[Note, ...] = field(default=(), compare=False)


@dataclass(slots=True)
class OpSite:
    """One op while its factors are chosen, mesh axis by mesh axis.

    A literal is the same in every device's program: unless it is zero, it cannot be one
    term of a sum.
    """

    rule: OpShardingRule
    operand_avals: Sequence[Any]
    result_avals: Sequence[Any]
    states: Sequence[Sharding]
    preferences: Sequence[Preferences]
    kinds: Sequence[str]
    axes: Axes
    small: int
    operands: list[Sharding] = field(default_factory=list)
    results: list[Sharding] = field(default_factory=list)
    parts: list[tuple[str, int]] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def decide(self) -> tuple[list[Sharding], list[Sharding], list[tuple[str, int]]]:
        """Needed operand shardings, made result shardings, and the split factors."""
        self.operands = [self.axes.replicated] * len(self.operand_avals)
        self.results = [self.axes.replicated] * len(self.result_avals)
        for axis in range(len(self.axes.names)):
            passing = self.passes_unreduced(axis)
            if passing is not None:
                self.pass_unreduced(axis, passing)
                continue
            chosen = self.choose(axis)
            if chosen is not None:
                self.split(axis, *chosen)
        return self.operands, self.results, self.parts

    # Unreduced operands

    def passes_unreduced(self, axis: int) -> frozenset[int] | None:
        """The operands that are, or become, terms of a sum that the op lets through."""
        terms = {i for i, s in enumerate(self.states) if s[axis] == Unreduced("sum")}
        if not terms:
            return None
        others = [i for i in range(len(self.states)) if i not in terms]
        if any(self.states[i][axis] is not None for i in others):
            return None
        for group in self.rule.linear:
            if terms <= group and all(map(self.may_be_term, group - terms)):
                return group
        return None

    def may_be_term(self, i: int) -> bool:
        """Whether a replicated operand costs little as one term of a sum."""
        small = elements(self.operand_avals[i]) < max(self.small, 2)
        return self.kinds[i] == ZERO or (self.kinds[i] == VALUE and small)

    def pass_unreduced(self, axis: int, group: frozenset[int]) -> None:
        for i in group:
            self.operands[i] = on_axis(self.operands[i], axis, Unreduced())
        for j in range(len(self.results)):
            self.results[j] = on_axis(self.results[j], axis, Unreduced())

    # Split operands

    def choose(self, axis: int) -> tuple[str, Split] | None:
        """The factor that `axis` splits, and a split of the same origin, or None."""
        if meets_stationary(axis, self.states, self.preferences):
            return self.least_moved(axis)
        chosen = self.largest(axis)
        return None if chosen is None else (chosen[0], Split(0, stored=chosen[1]))

    def least_moved(self, axis: int) -> tuple[str, Split] | None:
        """The same where a leaf is stationary."""
        return Meeting(
            self.rule,
            self.operand_avals,
            self.result_avals,
            self.kinds,
            [state[axis] for state in self.states],
            [preferred[axis] for preferred in self.preferences],
            self.axes.sizes[axis],
            self.factor,
            self.dim_of,
            functools.partial(self.can_part, axis),
        ).choose()

    def largest(self, axis: int) -> tuple[str, bool] | None:
        """The factor of the largest operands, of the batch before those of the state,
        and whether it is a stored one, or None."""
        stored_factors: dict[str, int] = {}
        batch: dict[str, int] = {}
        can_part = functools.cache(functools.partial(self.can_part, axis))
        for i, state in enumerate(self.states):
            split = state[axis]
            if not isinstance(split, Split):
                continue
            factor = self.factor(self.rule.operands[i], split.dim)
            kind = stored_factors if split.stored else batch
            if factor is not None and can_part(factor, split.stored):
                kind[factor] = kind.get(factor, 0) + nbytes(self.operand_avals[i])
            elif (run := self.run_factor(axis, i, split)) is not None:
                batch[run] = batch.get(run, 0) + nbytes(self.operand_avals[i])
        preferred, open_to_split = self.preferred(axis, can_part)
        if batch:
            best = max(batch, key=lambda f: (batch[f], f in preferred))
            return best, False
        for factor, stored in preferred.items():
            if not stored and self.grows(axis):
                if stored_factors:
                    self.notes.append(GROWN)
                return factor, False
            if not stored and not stored_factors and open_to_split:
                return factor, False
        if stored_factors:
            return self.cheapest(axis, stored_factors, preferred)
        if len(preferred) == 1 and open_to_split:
            return next(iter(preferred.items()))
        return None

    def factor(self, dims: Any, dim: int) -> str | None:
        if dim < 0:
            return flat_factor(dim) if self.rule.flat else None
        return self.rule.major(dims, dim, self.filled)

    @property
    def filled(self) -> frozenset[str]:
        return filled_factors(self.rule, self.parts, self.axes)

    def preferred(
        self, axis: int, can_part: Callable[[str, bool], bool]
    ) -> tuple[dict[str, bool], bool]:
        """Factors that consumers prefer split; whether none prefers a result whole."""
        factors: dict[str, bool] = {}
        open_to_split = True
        for dims, preferences in zip(self.rule.results, self.preferences, strict=True):
            for preference in sorted(preferences[axis], key=repr):
                if preference is None:
                    open_to_split = False
                    continue
                factor = self.factor(dims, preference.dim)
                if factor is not None and can_part(factor, preference.stored):
                    factors[factor] = factors.get(factor, True) and preference.stored
        return factors, open_to_split

    def grows(self, axis: int) -> bool:
        """Whether the result is larger than the stored operands: gather those
        instead."""
        made = sum(map(elements, self.result_avals))
        return made > GROWTH * sum(
            elements(a)
            for a, s in zip(self.operand_avals, self.states, strict=True)
            if isinstance(s[axis], Split)
        )

    def cheapest(
        self, axis: int, stored_factors: dict[str, int], preferred: dict[str, bool]
    ) -> tuple[str, bool] | None:
        """The stored factor for which least is gathered or reduced; None: gather
        all."""

        def cost(factor: str | None) -> tuple[float, bool]:
            gathered = sum(b for f, b in stored_factors.items() if f != factor)
            reduced = 0
            if factor is not None and (self.reduces(factor)):
                reduced = 2 * sum(map(nbytes, self.result_avals))
            return gathered + reduced, factor not in preferred

        best = min([*stored_factors, None], key=cost)
        return None if best is None else (best, True)

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
        flattened = any(is_flat_factor(f) for f, _ in self.parts)
        if flattened or not self.rule.is_splittable(factor, self.filled):
            return False
        parts = math.prod(self.axes.sizes[a] for f, a in self.parts if f == factor)
        size = self.rule.size(factor)
        if self.shift(factor) and parts > 1:
            return False
        partners = self.additive_partners(factor)
        if any(self.kinds[i] == LITERAL for i in partners):
            return False
        if size == 0 or size % (parts * count):
            padded = stored and parts == 1 and self.rule.stands_alone(factor)
            if not padded or size < count:
                return False
        return all(
            can_split(aval.shape, sharding, axis, Split(dim, stored), self.axes)
            for dims, aval, sharding in self.sides()
            if (dim := self.rule.dim_of(dims, factor)) is not None
        )

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

    def split(self, axis: int, factor: str, origin: Split) -> None:
        self.parts.append((factor, axis))
        for i, dims in enumerate(self.rule.operands):
            dim = self.dim_of(dims, factor)
            if dim is not None:
                runs = self.runs(dims[dim], factor) if dim >= 0 else 0
                block = replace(origin, dim=dim, shift=self.shift(factor), runs=runs)
                self.operands[i] = on_axis(self.operands[i], axis, block)
        for i in self.additive_partners(factor):
            self.operands[i] = on_axis(self.operands[i], axis, Unreduced())
        for j, dims in enumerate(self.rule.results):
            dim = self.dim_of(dims, factor)
            state = (
                Unreduced(self.reducer(factor)) if dim is None else of_dim(origin, dim)
            )
            self.results[j] = on_axis(self.results[j], axis, state)

    def run_factor(self, axis: int, i: int, split: Split) -> str | None:
        """The factor of equal runs, such as the rows of each microbatch, that `axis`
        may split instead of the runs themselves, which are too few."""
        state, aval = self.states[i], self.operand_avals[i]
        alone = [s for s in state if isinstance(s, Split) and s.dim == split.dim]
        if not self.rule.regroups or split.stored or split.dim < 0 or len(alone) > 1:
            return None
        if self.parts or not isinstance(aval.dtype, np.dtype):
            return None
        dims = self.rule.operands[i][split.dim]
        factors = [f for f in dims if self.rule.size(f) > 1]
        if len(factors) != 2 or factors[1] in self.rule.whole:
            return None
        (result,), (preferences,), minor = (
            self.rule.results,
            self.preferences,
            factors[1],
        )
        at = self.rule.dim_of(result, minor)
        leads = at is not None and self.rule.major(result, at) == minor
        divides = self.rule.size(minor) % self.axes.sizes[axis] == 0
        preferred = preferences[axis] != frozenset({None})
        return minor if leads and divides and preferred else None

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
