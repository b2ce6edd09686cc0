"""How control flow is sharded: its bodies are solved like the program around them.

In: a scan, while, cond or remat node, how its operands are sharded, what is wanted of
its results. Out: a `Decision` that holds the plans of the bodies. Carries are a
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
from shardfn._propagation.preferences import Wants, reduced, union


@dataclass(frozen=True, slots=True)
class Solved:
    """A body's plan and what the body wants its arguments in."""

    plan: BodyPlan
    wants: tuple[Wants, ...]


class Solve(Protocol):
    """Solves one body; see `propagate.Solver.solve`."""

    def __call__(
        self,
        program: Program,
        inputs: Sequence[Sharding],
        required: Sequence[Sharding | None],
        wants: Sequence[Wants],
        keep: Sequence[bool],
    ) -> Solved: ...


@dataclass(slots=True)
class FlowSite:
    """One control-flow node while it is decided.

    Attributes:
      node: the node.
      operand_avals: avals of its operands.
      result_avals: avals of its results.
      states: shardings of its operands now.
      wants: wants of its results.
      operand_wants: wants of its operands so far.
      keep: per result, whether it may stay unreduced.
      axes: the mesh axes.
      small: values with fewer elements may stay unreduced across iterations.
      solve: solves a body.
      control: which sums of loops to leave unreduced until after them.
    """

    node: Node
    operand_avals: Sequence[Any]
    result_avals: Sequence[Any]
    states: Sequence[Sharding]
    wants: Sequence[Wants]
    operand_wants: Sequence[Wants]
    keep: Sequence[bool]
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
        """Operand `i` with unreduced terms summed, towards what is wanted of it."""
        return reduced(
            self.states[i], self.operand_wants[i], self.operand_avals[i], self.axes
        )

    @property
    def no_wants(self) -> Wants:
        return (frozenset(),) * len(self.axes.names)

    # remat

    def remat(self) -> Decision:
        operands = tuple(map(self.entering, range(len(self.states))))
        solved = self.solve(
            self.node.bodies[0],
            operands,
            [None] * len(self.wants),
            self.wants,
            self.keep,
        )
        out = solved.plan.output_shardings
        return Decision(operands, out, out, (), (solved.plan,), solved.wants)

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
        wants = [
            _shift_wants(w, -1) if j in region.stacks else w
            for j, w in enumerate(self.wants)
        ]
        keep_ys = span(self.keep, region.stacks)

        def solve(carry: Sequence[Sharding], pin: bool) -> Solved:
            fixed = list(carry) if pin else [None] * len(carry)
            carried = [union(w, c) for w, c in zip(wants, carry, strict=False)]
            return self.solve(
                body,
                (*consts, *carry, *inner_xs),
                (*fixed, *[None] * len(keep_ys)),
                (*carried, *span(wants, region.stacks)),
                (*(True for _ in carry), *keep_ys),
            )

        carry = self.carries(
            body, region.carries, lambda c: solve(c, False).plan, wants
        )
        solved = solve(carry, True)
        ys = span(solved.plan.output_shardings, region.stacks)
        out = (*carry, *(_shift(y, 1) for y in ys))
        back = tuple(
            _shift_wants(w, 1) if i in region.slices else w
            for i, w in enumerate(solved.wants)
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
            (self.no_wants,) * len(body.outputs),
            (False,) * len(body.outputs),
        )
        wants = tuple(
            tuple(frozenset(() if isinstance(s, Unreduced) else (s,)) for s in operand)
            for operand in loop.operands
        )
        operands, results = loop.operands, loop.results
        return Decision(operands, results, results, (), (solved.plan,), wants)

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
                tuple(union(w, c) for w, c in zip(self.wants, carry, strict=True)),
                (False,) * len(carry),
            )

        carry = self.carries(
            body,
            span(looped.operands, looped.carries),
            lambda c: solve(c, False).plan,
            self.wants,
            may_sum=False,
        )
        solved = solve(carry, True)
        solved_test = self.solve(
            test,
            (*tests, *carry),
            (self.axes.replicated,),
            [self.no_wants],
            (False,),
        )
        wants = (*span(solved_test.wants, tested.constants), *solved.wants)
        plans = (solved_test.plan, solved.plan)
        operands = (*tests, *consts, *carry)
        return Decision(operands, carry, carry, (), plans, wants)

    def carries(
        self,
        body: Program,
        positions: Sequence[int],
        solve: Callable[[Sequence[Sharding]], BodyPlan],
        wants: Sequence[Wants],
        may_sum: bool = True,
    ) -> tuple[Sharding, ...]:
        """Shardings of the operands at `positions`, which the loop carries."""
        carries = Carries(
            body=body,
            solve=solve,
            avals=[self.operand_avals[i] for i in positions],
            wants=wants[: len(positions)],
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
                self.solve(body, operands, required, self.wants, (False,) * count)
                for body in self.node.bodies
            ]

        free = solve([None] * count)
        joined = tuple(
            self.join_branches([s.plan.output_shardings[j] for s in free])
            for j in range(count)
        )
        solved = solve(joined)
        wants = [
            tuple(frozenset().union(*sets) for sets in zip(*each, strict=True))
            for each in zip(*(s.wants for s in solved), strict=True)
        ]
        whole = tuple(frozenset({None}) for _ in self.axes.names)
        return Decision(
            (index, *operands),
            joined,
            joined,
            (),
            tuple(s.plan for s in solved),
            (whole, *wants),
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


def _shift_wants(wants: Wants, by: int) -> Wants:
    return tuple(
        frozenset(
            None if s is None else _shifted(s, by)
            for s in opinions
            if s is None or by > 0 or s.dim not in (0, flat(0))
        )
        for opinions in wants
    )
