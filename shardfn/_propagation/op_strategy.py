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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from shardfn._core.limits import GROWTH, REPEATED_FLOPS
from shardfn._core.program import VALUE, ZERO
from shardfn._core.reasons import Note
from shardfn._core.sharding import (
    AxisSharding,
    Split,
    Unreduced,
    of_dim,
    on_axis,
)
from shardfn._core.sizes import elements, nbytes
from shardfn._propagation.decision import Decision
from shardfn._propagation.splittable_factors import SplittableFactors
from shardfn._propagation.stationary import Meeting, meets_stationary

GROWN = Note(
    "propagate",
    f"the result has more than {GROWTH} times the elements of the stored operands, so "
    "these are gathered in its place (limits.GROWTH)",
)


@dataclass(slots=True)
class OpSite(SplittableFactors):
    """One op while its factors are chosen, mesh axis by mesh axis.

    Attributes:
      forced: by mesh axis, a factor of the batch that it splits if it may.
    """

    forced: Mapping[int, str] = field(default_factory=dict)

    def decide(self) -> Decision:
        """How the op runs; its results are left as it makes them."""
        self.operands = [self.axes.replicated] * len(self.operand_avals)
        self.results = [self.axes.replicated] * len(self.result_avals)
        for axis in range(len(self.axes.names)):
            if self.rule.terms:
                self.with_terms(axis)
                continue
            passing = self.passes_unreduced(axis)
            if passing is not None:
                self.pass_unreduced(axis, passing)
                continue
            chosen = self.choose(axis)
            if chosen is not None:
                self.split(axis, *chosen)
        made = tuple(self.results)
        return Decision(
            tuple(self.operands), made, made, tuple(self.parts), notes=tuple(self.notes)
        )

    # Unreduced operands

    def passes_unreduced(self, axis: int) -> frozenset[int] | None:
        """The operands that are, or become, terms of a sum that the op lets through."""
        terms = {i for i, s in enumerate(self.states) if s[axis] == Unreduced("sum")}
        if not terms:
            return None
        others = [i for i in range(len(self.states)) if i not in terms]
        if any(self.states[i][axis] is not None for i in others):
            if not (self.selects_less(axis, terms) or self.reads_less(axis, terms)):
                return None
        for group in self.rule.linear:
            if terms <= group and all(map(self.may_be_term, group - terms)):
                return group
        return None

    def selects_less(self, axis: int, terms: set[int]) -> bool:
        """Whether less moves if what is selected of terms is summed, and where is
        gathered, than if the terms are: of a count of all rows of a table those that a
        step has looked up."""
        where = (
            nbytes(aval)
            for i, aval in enumerate(self.operand_avals)
            if i not in terms and self.states[i][axis] is not None
        )
        selected = 2 * sum(map(nbytes, self.result_avals))
        return self.rule.picks and sum(where) + selected < sum(
            nbytes(self.operand_avals[i]) for i in terms
        )

    def reads_less(self, axis: int, terms: set[int]) -> bool:
        """Whether less moves, and takes less time, if a product of terms is summed and
        its other factor, a stored one, is gathered, than if the terms are: of a
        weight's gradient those of the thin factors that were added to it."""
        others = [i for i in range(len(self.states)) if i not in terms]
        splits = [self.states[i][axis] for i in others]
        is_product = self.rule.reduce and not self.rule.picks and not self.rule.terms
        if not is_product or not all(isinstance(s, Split) and s.stored for s in splits):
            return False
        if meets_stationary(axis, self.states, self.preferences):
            return False
        sizes = (
            [nbytes(self.operand_avals[i]) for i in given] for given in (terms, others)
        )
        summed, gathered = map(sum, sizes)
        # Without it each device makes a part of the product.
        flops = 2 * math.prod(size for _, size in self.rule.sizes)
        sent = gathered + sum(map(nbytes, self.result_avals))
        return sent + flops / REPEATED_FLOPS < summed

    def may_be_term(self, i: int) -> bool:
        """Whether a replicated operand costs little as one term of a sum."""
        small = elements(self.operand_avals[i]) < max(self.small, 2)
        return self.kinds[i] == ZERO or (self.kinds[i] == VALUE and small)

    def pass_unreduced(self, axis: int, group: frozenset[int]) -> None:
        for i in group:
            self.operands[i] = on_axis(self.operands[i], axis, Unreduced())
        for j in range(len(self.results)):
            self.results[j] = on_axis(self.results[j], axis, Unreduced())

    def with_terms(self, axis: int) -> None:
        """Splits the factor that counts terms, where an operand has it split."""
        pairs = zip(self.states, self.rule.operands, strict=True)
        splits = ((s[axis], dims) for s, dims in pairs)
        counting = any(
            isinstance(s, Split) and self.factor(dims, s.dim) == self.rule.terms
            for s, dims in splits
        )
        if counting and self.can_part(axis, self.rule.terms, True):
            self.split(axis, self.rule.terms, Split(0, stored=True))
        elif (chosen := self.choose(axis)) and chosen[0] != self.rule.terms:
            self.split(axis, *chosen)

    # Split operands

    def choose(self, axis: int) -> tuple[str, Split] | None:
        """The factor that `axis` splits, and a split of the same origin, or None."""
        forced = self.forced.get(axis)
        if forced is not None and self.can_part(axis, forced, False):
            return forced, Split(0)
        if meets_stationary(axis, self.states, self.preferences):
            return self.least_moved(axis)
        return self.largest(axis)

    def least_moved(self, axis: int) -> tuple[str, Split] | None:
        """The same where a leaf is stationary."""
        return Meeting(
            self.rule,
            self.operand_avals,
            self.result_avals,
            self.kinds,
            self.sources or list(map(nbytes, self.operand_avals)),
            [state[axis] for state in self.states],
            [preferred[axis] for preferred in self.preferences],
            self.axes.sizes[axis],
            self.factor,
            self.dim_of,
            functools.partial(self.can_part, axis),
        ).choose()

    def largest(self, axis: int) -> tuple[str, Split] | None:
        """The factor of the largest operands, of the batch before those of the state,
        and of rows as they came in before others, or None."""
        stored_factors: dict[str, int] = {}
        batch: dict[str, int] = {}
        came, regrouped = set[str](), set[str]()
        can_part = functools.cache(functools.partial(self.can_part, axis))
        for i, state in enumerate(self.states):
            split = state[axis]
            if not isinstance(split, Split):
                continue
            factor = self.factor(self.rule.operands[i], split.dim)
            kind = stored_factors if split.stored else batch
            together = split.stored or self.part_together(axis, i, factor)
            if factor is not None and can_part(factor, split.stored) and together:
                kind[factor] = kind.get(factor, 0) + nbytes(self.operand_avals[i])
                if not split.moved:
                    came.add(factor)
                continue
            run = self.run_factor(axis, i, split) or self.joined_factor(axis, i, split)
            if run is not None:
                batch[run] = batch.get(run, 0) + nbytes(self.operand_avals[i])
                regrouped |= self.laid_out_with(run)
        preferred, open_to_split = self.preferred(axis, can_part)
        if regrouped and not came:  # it moves anyway: to rows as they came in
            rows = [(f, s.origin) for f, s in preferred.items() if f in regrouped]
            back = [f for f, origin in rows if origin == (False, False)]
            if back:
                return back[0], preferred[back[0]]
        if batch:
            best = max(batch, key=lambda f: (f in came, batch[f], f in preferred))
            return best, Split(0, moved=best not in came)
        for factor, origin in preferred.items():
            if not origin.stored and self.grows(axis):
                if stored_factors:
                    self.notes.append(GROWN)
                return factor, origin
            if not origin.stored and not stored_factors and open_to_split:
                return factor, origin
        if stored_factors:
            return self.cheapest(axis, stored_factors, preferred)
        if len(preferred) == 1 and open_to_split:
            return next(iter(preferred.items()))
        return None

    def preferred(
        self, axis: int, can_part: Callable[[str, bool], bool]
    ) -> tuple[dict[str, Split], bool]:
        """Factors that consumers prefer split, and of which origin; whether none
        prefers a result whole."""
        factors: dict[str, Split] = {}
        open_to_split = True
        for dims, preferences in zip(self.rule.results, self.preferences, strict=True):
            for preference in sorted(preferences[axis], key=repr):
                if preference is None:
                    open_to_split = False
                    continue
                factor = self.factor(dims, preference.dim)
                if factor is not None and can_part(factor, preference.stored):
                    origin = Split(0, preference.stored, moved=preference.moved)
                    known = factors.get(factor, origin)
                    factors[factor] = min(known, origin, key=lambda s: s.origin)
        return factors, open_to_split

    def grows(self, axis: int) -> bool:
        """Whether the result is larger than the stored operands: gather those
        instead. What can be made anywhere, such as noise, is none of them, however it
        is split so far."""
        made = sum(map(elements, self.result_avals))
        stored = sum(
            elements(aval)
            for aval, state, free in zip(
                self.operand_avals, self.states, self.free, strict=True
            )
            if isinstance(state[axis], Split) and not free
        )
        return made > GROWTH * stored

    def cheapest(
        self, axis: int, stored_factors: dict[str, int], preferred: dict[str, Split]
    ) -> tuple[str, Split] | None:
        """The stored factor for which least is gathered or reduced; None: gather
        all."""

        def cost(factor: str | None) -> tuple[float, bool]:
            gathered = sum(b for f, b in stored_factors.items() if f != factor)
            reduced = 0
            if factor is not None and (self.reduces(factor)):
                reduced = 2 * sum(map(nbytes, self.result_avals))
            return gathered + reduced, factor not in preferred

        best = min([*stored_factors, None], key=cost)
        return None if best is None else (best, Split(0, stored=True))

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
            if dim is None:
                state: AxisSharding = Unreduced(self.reducer(factor))
            else:
                runs = self.runs(dims[dim], factor) if dim >= 0 else 0
                state = replace(of_dim(origin, dim), runs=runs)
            self.results[j] = on_axis(self.results[j], axis, state)
