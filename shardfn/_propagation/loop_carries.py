"""Shardings of what a loop carries: a fixpoint.

In: the carries' initial shardings and a function that solves the loop's body. Out: one
sharding per carry. Whatever the fixpoint ends at is correct, since the body's results
are moved back to it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardfn._core.control import Control
from shardfn._core.leaves import NO_LEAF, Names
from shardfn._core.limits import LOOP_BYTES
from shardfn._core.plan import BodyPlan, Reshard
from shardfn._core.program import Program
from shardfn._core.reasons import Note
from shardfn._core.resharding import can_split
from shardfn._core.sharding import (
    Axes,
    AxisSharding,
    Sharding,
    Split,
    Unreduced,
    on_axis,
)
from shardfn._core.sizes import elements, nbytes
from shardfn._propagation.preferences import Preferences, preferred, split_as_preferred

SUMMED = (
    "the sums that it carries take {} together, at most {} (limits.LOOP_BYTES, "
    "limits.LOOP_LIVE), so they are reduced once, behind it"
)
OF_ONE = (
    "the sums that it carries take {} together, {} of them of a weight as large as one "
    "that it gathers whole, the others at most {} (limits.LOOP_BYTES, "
    "limits.LOOP_LIVE), so they are reduced once, behind it"
)
SCATTERED = (
    "the sums that it carries take {} together, more than {} (limits.LOOP_BYTES, "
    "limits.LOOP_LIVE), so they are reduced in every iteration"
)


@dataclass(frozen=True, slots=True)
class Carries:
    """The carries of one loop.

    Attributes:
      body: the program of one iteration.
      solve: from shardings of the carries to the plan of one iteration, whose first
        outputs are the carries.
      avals: their avals.
      preferences: what the consumers of their last values prefer.
      axes: the mesh axes.
      control: which sums to leave unreduced until after the loop.
      notes: the threshold that decided, once it has.
    """

    body: Program
    solve: Callable[[Sequence[Sharding]], BodyPlan]
    avals: Sequence[Any]
    preferences: Sequence[Preferences]
    axes: Axes
    control: Control
    notes: list[Note] = field(default_factory=list)

    def shardings(
        self, initial: Sequence[Sharding], may_sum: bool
    ) -> tuple[Sharding, ...]:
        """The fixpoint, from the carries' `initial` shardings.

        A carry that starts replicated may become split or, if `may_sum`, a sum whose
        terms stay on their devices until after the loop. Each change is to a sharding
        that it has not had, of which there are few, or to replicated: so the fixpoint
        ends, after at least as many rounds as carries hand a split on to each other.
        """
        carry = list(initial)
        sums = self.sums(carry) if may_sum else {}
        for k, (state, aval) in enumerate(zip(initial, self.avals, strict=True)):
            if k in sums:
                carry[k] = sums[k]
            elif all(s is None for s in state):
                carry[k] = split_as_preferred(
                    state, self.preferences[k], aval, self.axes
                )
        history: list[set[AxisSharding]] = [set(s) for s in carry]
        while True:
            made = self.solve(carry).output_shardings
            joined = [
                self.join(k, old, new, history[k])
                for k, (old, new) in enumerate(zip(carry, made, strict=False))
            ]
            if joined == carry:
                return tuple(carry)
            carry = joined

    def sums(self, carry: Sequence[Sharding]) -> dict[int, Sharding]:
        """The carries that can stay unreduced until after the loop, and how.

        Those that are to be deferred do along every mesh axis, and so do all others if
        they are small together, but for one that is no larger than a weight that each
        iteration gathers: a head's in a loop over parts of the tokens. The rest is
        scattered in every iteration: split along the axis of the stored state, and
        unreduced along the others, which takes no more memory.
        """
        plan = self.solve(carry)
        into = _reduced_into(self.body, plan)
        found = [
            k
            for k, (state, made) in enumerate(
                zip(carry, plan.output_shardings, strict=False)
            )
            if all(s is None for s in on_axis(state, self.axes.stored, None))
            and (k in into or any(isinstance(s, Unreduced) for s in made))
        ]
        asked = {k: self.control.of(*self.leaf(k)).accumulate for k in found}
        auto = [self.avals[k] for k in found if asked[k] == "auto"]
        size, most = sum(map(nbytes, auto)), _most_gathered(self.body, plan)
        one = max((nbytes(x) for x in auto if elements(x) <= most), default=0)
        limit = max(LOOP_BYTES, self.control.loop_bytes)
        whole = size - one <= limit
        if size > limit and whole:
            self.notes[:] = [Note("propagate", OF_ONE, (size, one, limit))]
        elif size:
            text = SUMMED if whole else SCATTERED
            self.notes[:] = [Note("propagate", text, (size, limit))]
        trial = list(carry)
        for k in found:
            waits = whole if asked[k] == "auto" else asked[k] == "defer"
            trial[k] = self.terms(k, carry[k], waits)
        if trial == carry:
            return {}
        made = self.solve(trial).output_shardings
        return {k: trial[k] for k in found if made[k] == trial[k] != carry[k]}

    def leaf(self, k: int) -> Names:
        """The names of the state leaves that carry `k` belongs to."""
        atom = self.body.outputs[k]
        return self.body.leaf(atom) if isinstance(atom, int) else NO_LEAF

    def terms(self, k: int, initial: Sharding, whole: bool) -> Sharding:
        """Carry `k` unreduced along every mesh axis if `whole`, else along all but the
        stored one. One that cannot be split along that is whole on every device anyway,
        and is unreduced along all of them too."""
        terms = tuple(Unreduced() if n > 1 else None for n in self.axes.sizes)
        stored = self.axes.stored
        if whole and initial[stored] is None:
            return terms
        split = initial[stored] or preferred(self.preferences[k][stored])
        others = on_axis(initial, stored, None)
        shape = self.avals[k].shape
        if not isinstance(split, Split) or not can_split(
            shape, others, stored, split, self.axes
        ):
            return terms if initial[stored] is None else initial
        return on_axis(terms, stored, split)

    def join(
        self, k: int, old: Sharding, new: Sharding, history: set[AxisSharding]
    ) -> Sharding:
        """The sharding of carry `k` for the next round."""
        out = old
        for axis, (a, b) in enumerate(zip(old, new, strict=True)):
            if a == b:
                continue
            state: AxisSharding = a
            if isinstance(a, Unreduced):
                state = None
            elif a is None and isinstance(b, Unreduced):
                state = preferred(self.preferences[k][axis])
            elif a is None:
                state = b
            elif isinstance(b, Split) and b.origin < a.origin:
                state = b
            fits = not isinstance(state, Split) or can_split(
                self.avals[k].shape,
                on_axis(out, axis, None),
                axis,
                state,
                self.axes,
            )
            revisits = state in history and state is not None
            state = state if fits and (state == a or not revisits) else None
            if state is not None:
                history.add(state)
            out = on_axis(out, axis, state)
        return out


def _most_gathered(body: Program, plan: BodyPlan) -> int:
    """The most elements of a weight that a body, or a remat in it, gathers whole."""
    most = 0
    for step in plan.steps:
        if isinstance(step, Reshard):
            if step.gathers_state:
                most = max(most, math.prod(step.shape))
        elif body.nodes[step.node].kind == "remat":
            inner = body.nodes[step.node].bodies[0], step.bodies[0]
            most = max(most, _most_gathered(*inner))
    return most


def _reduced_into(body: Program, plan: BodyPlan) -> set[int]:
    """The outputs of a body that are linear in something that it, or a scan or remat
    in it, reduces."""
    linear: set[int] = set()
    for step in plan.steps:
        if isinstance(step, Reshard):
            if any(isinstance(s, Unreduced) for s in step.path[0]):
                linear.add(step.source.value)
            continue
        node = body.nodes[step.node]
        if node.kind in ("scan", "remat"):
            inside = _reduced_into(node.bodies[0], step.bodies[0])
            linear.update(node.outputs[j] for j in inside)
        if node.rule is None:
            continue
        passing = [node.inputs[i] for group in node.rule.linear for i in group]
        if not linear.isdisjoint(v for v in passing if isinstance(v, int)):
            linear.update(node.outputs)
    outputs = enumerate(body.outputs)
    return {j for j, atom in outputs if isinstance(atom, int) and atom in linear}
