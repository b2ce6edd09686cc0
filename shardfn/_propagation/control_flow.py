"""How control flow is sharded: its bodies are solved like the program around them.

In: a scan, while, cond or remat node, how its operands are sharded, what is preferred
of its results. Out: a `Decision` that holds the plans of the bodies. Carries are a
fixpoint over their shardings, branches of a cond are joined.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from shardfn._core.control import Control
from shardfn._core.plan import BodyPlan
from shardfn._core.program import Node, Program
from shardfn._core.reasons import Note
from shardfn._core.regions import span
from shardfn._core.resharding import can_split
from shardfn._core.sharding import (
    Axes,
    Sharding,
    Split,
    Unreduced,
    flat,
    on_axis,
)
from shardfn._propagation.batch_scans import RowLoop, row_loop
from shardfn._propagation.loop_carries import Carries
from shardfn._propagation.op_strategy import Decision
from shardfn._propagation.preferences import Preferences, reduced, union


@dataclass(frozen=True, slots=True)
class Solved:
    """A body's plan and what the body prefers its arguments in."""

    plan: BodyPlan
    preferences: tuple[Preferences, ...]


class Solve(Protocol):
    """Solves one body; see `propagate.Solver.solve`."""

    def __call__(
        self,
        program: Program,
        inputs: Sequence[Sharding],
        required: Sequence[Sharding | None],
        preferences: Sequence[Preferences],
        may_stay_unreduced: Sequence[bool],
    ) -> Solved: ...


@dataclass(slots=True)
class FlowSite:
    """One control-flow node while it is decided.

    Attributes:
      node: the node.
      operand_avals: avals of its operands.
      result_avals: avals of its results.
      states: shardings of its operands now.
      preferences: those of its results' consumers.
      operand_preferences: those of its operands' consumers so far.
      may_stay_unreduced: per result, whether it may stay unreduced.
      axes: the mesh axes.
      small: values with fewer elements may stay unreduced across iterations.
      solve: solves a body.
      control: which sums of loops to leave unreduced until after them.
    """

    node: Node
    operand_avals: Sequence[Any]
    result_avals: Sequence[Any]
    states: Sequence[Sharding]
    preferences: Sequence[Preferences]
    operand_preferences: Sequence[Preferences]
    may_stay_unreduced: Sequence[bool]
    axes: Axes
    small: int
    solve: Solve
    control: Control
    notes: list[Note] = field(default_factory=list)

    def decide(self) -> Decision:
        decide = {
            "remat": self.remat,
            "scan": self.scan,
            "while": self.loop,
            "cond": self.branch,
            "custom": self.remat,
        }[self.node.kind]
        return replace(decide(), notes=tuple(self.notes))

    # Helpers

    def entering(self, i: int) -> Sharding:
        """Operand `i` with unreduced terms summed, towards what is preferred."""
        return reduced(
            self.states[i],
            self.operand_preferences[i],
            self.operand_avals[i],
            self.axes,
        )

    @property
    def no_preferences(self) -> Preferences:
        return (frozenset(),) * len(self.axes.names)

    # remat

    def remat(self) -> Decision:
        operands = tuple(map(self.entering, range(len(self.states))))
        solved = self.solve(
            self.node.bodies[0],
            operands,
            [None] * len(self.preferences),
            self.preferences,
            self.may_stay_unreduced,
        )
        out = solved.plan.output_shardings
        return Decision(operands, out, out, (), (solved.plan,), solved.preferences)

    # scan

    def scan(self) -> Decision:
        (body,), (region,) = self.node.bodies, self.node.regions
        states = [self.entering(i) for i in range(len(self.states))]
        loop = row_loop(self.node, self.operand_avals, states, self.axes)
        if loop is not None:
            return self.over_rows(loop)
        consts = span(states, region.constants)
        xs = [self.scanned(i) for i in region.slices]
        inner_xs = [_shift(s, -1) for s in xs]
        preferences = [
            _shift_preferences(w, -1) if j in region.stacks else w
            for j, w in enumerate(self.preferences)
        ]
        stacks_may_stay = span(self.may_stay_unreduced, region.stacks)

        def solve(carry: Sequence[Sharding], pin: bool) -> Solved:
            fixed = list(carry) if pin else [None] * len(carry)
            carried = [union(w, c) for w, c in zip(preferences, carry, strict=False)]
            return self.solve(
                body,
                (*consts, *carry, *inner_xs),
                (*fixed, *[None] * len(stacks_may_stay)),
                (*carried, *span(preferences, region.stacks)),
                (*(True for _ in carry), *stacks_may_stay),
            )

        carry = self.carries(
            body, region.carries, lambda c: solve(c, False).plan, preferences
        )
        solved = solve(carry, True)
        ys = span(solved.plan.output_shardings, region.stacks)
        out = (*carry, *(_shift(y, 1) for y in ys))
        back = tuple(
            _shift_preferences(w, 1) if i in region.slices else w
            for i, w in enumerate(solved.preferences)
        )
        return Decision((*consts, *carry, *xs), out, out, (), (solved.plan,), back)

    def over_rows(self, loop: RowLoop) -> Decision:
        """A scan over local rows: inside, a row is whole on its device."""
        (body,) = self.node.bodies
        whole = self.axes.replicated
        solved = self.solve(
            body,
            (whole,) * len(body.inputs),
            (whole,) * len(body.outputs),
            (self.no_preferences,) * len(body.outputs),
            (False,) * len(body.outputs),
        )
        preferences = tuple(
            tuple(frozenset(() if isinstance(s, Unreduced) else (s,)) for s in operand)
            for operand in loop.operands
        )
        operands, results = loop.operands, loop.results
        return Decision(operands, results, results, (), (solved.plan,), preferences)

    def scanned(self, i: int) -> Sharding:
        """Sharding of a scanned operand: each iteration needs a slice of dimension
        0."""
        state, shape = self.entering(i), self.operand_avals[i].shape
        for axis, split in enumerate(state):
            if not isinstance(split, Split) or split.dim not in (0, flat(0)):
                continue
            state = on_axis(state, axis, None)
            for dim in range(1, len(shape)):
                other = Split(dim, split.stored)
                whole = shape[dim] % self.axes.sizes[axis] == 0
                if whole and can_split(shape, state, axis, other, self.axes):
                    state = on_axis(state, axis, other)
                    break
        return state

    # while

    def loop(self) -> Decision:
        test, body = self.node.bodies
        tested, looped = self.node.regions
        tests = [self.entering(i) for i in span(tested.operands, tested.constants)]
        consts = [self.entering(i) for i in span(looped.operands, looped.constants)]

        def solve(carry: Sequence[Sharding], pin: bool) -> Solved:
            fixed = carry if pin else [None] * len(carry)
            return self.solve(
                body,
                (*consts, *carry),
                tuple(fixed),
                tuple(
                    union(w, c) for w, c in zip(self.preferences, carry, strict=True)
                ),
                (False,) * len(carry),
            )

        carry = self.carries(
            body,
            span(looped.operands, looped.carries),
            lambda c: solve(c, False).plan,
            self.preferences,
            may_sum=False,
        )
        solved = solve(carry, True)
        solved_test = self.solve(
            test,
            (*tests, *carry),
            (self.axes.replicated,),
            [self.no_preferences],
            (False,),
        )
        preferences = (
            *span(solved_test.preferences, tested.constants),
            *solved.preferences,
        )
        plans = (solved_test.plan, solved.plan)
        operands = (*tests, *consts, *carry)
        return Decision(operands, carry, carry, (), plans, preferences)

    def carries(
        self,
        body: Program,
        positions: Sequence[int],
        solve: Callable[[Sequence[Sharding]], BodyPlan],
        preferences: Sequence[Preferences],
        may_sum: bool = True,
    ) -> tuple[Sharding, ...]:
        """Shardings of the operands at `positions`, which the loop carries."""
        carries = Carries(
            body=body,
            solve=solve,
            avals=[self.operand_avals[i] for i in positions],
            preferences=preferences[: len(positions)],
            axes=self.axes,
            control=self.control,
        )
        found = carries.shardings([self.entering(i) for i in positions], may_sum)
        self.notes += carries.notes
        return found

    # cond

    def branch(self) -> Decision:
        index = self.axes.replicated
        operands = tuple(map(self.entering, self.node.regions[0].operands))
        count = len(self.result_avals)

        def solve(required: Sequence[Sharding | None]) -> list[Solved]:
            return [
                self.solve(body, operands, required, self.preferences, (False,) * count)
                for body in self.node.bodies
            ]

        free = solve([None] * count)
        joined = tuple(
            self.join_branches([s.plan.output_shardings[j] for s in free])
            for j in range(count)
        )
        solved = solve(joined)
        preferences = [
            tuple(frozenset().union(*sets) for sets in zip(*each, strict=True))
            for each in zip(*(s.preferences for s in solved), strict=True)
        ]
        whole = tuple(frozenset({None}) for _ in self.axes.names)
        return Decision(
            (index, *operands),
            joined,
            joined,
            (),
            tuple(s.plan for s in solved),
            (whole, *preferences),
        )

    def join_branches(self, shardings: Sequence[Sharding]) -> Sharding:
        """Split as all branches that split agree; a replicated branch takes its
        block."""
        out = []
        for states in zip(*shardings, strict=True):
            splits = {s for s in states if isinstance(s, Split)}
            out.append(splits.pop() if len(splits) == 1 else None)
        return tuple(out)


def _shift(state: Sharding, by: int) -> Sharding:
    """Sharding of a slice of (`by=-1`), or of a stack of (`by=1`), such values."""
    return tuple(_shifted(s, by) if isinstance(s, Split) else s for s in state)


def _shifted(split: Split, by: int) -> Split:
    return Split(split.dim + (by if split.dim >= 0 else -by), split.stored)


def _shift_preferences(preferences: Preferences, by: int) -> Preferences:
    return tuple(
        frozenset(
            None if s is None else _shifted(s, by)
            for s in opinions
            if s is None or by > 0 or s.dim not in (0, flat(0))
        )
        for opinions in preferences
    )
