"""How control flow is sharded: its bodies are solved like the program around them.

In: a scan, while, cond or remat node, how its operands are sharded, what is wanted of
  its
results. Out: a `Decision` that holds the plans of the bodies. Carries are a bounded
fixpoint over their shardings, branches of a cond are joined.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from shardfn._decide import Decision, Wants, itemsize
from shardfn._plan import BodyPlan, Reshard
from shardfn._program import Node, Program
from shardfn._reshard import can_split
from shardfn._rule import OpShardingRule
from shardfn._sharding import (
    Axes,
    AxisSharding,
    Sharding,
    Split,
    Unreduced,
    flat,
    on_axis,
)

CARRY_ROUNDS = 6

LOOP_BYTES = 2**26
"""What a loop may hold whole, in bytes: the sums it carries unreduced and, by
themselves, the weights that all of its iterations share."""


@dataclass(frozen=True, slots=True)
class Solved:
    """A body's plan and what the body wants its arguments in."""

    plan: BodyPlan
    wants: tuple[Wants, ...]


class Solve(Protocol):
    """Solves one body; see `_propagate.Solver.solve`."""

    def __call__(
        self,
        program: Program,
        inputs: Sequence[Sharding],
        required: Sequence[Sharding | None],
        wants: Sequence[Wants],
        keep: Sequence[bool],
        phase: str,
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
      phase: the phase that the node runs in.
      solve: solves a body.
      size: elements of an aval.
      rule: the rule of a node.
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
    phase: str
    solve: Solve
    size: Callable[[Any], int]
    rule: Callable[[Node], OpShardingRule | None]

    def decide(self) -> Decision:
        return {
            "remat": self.remat,
            "scan": self.scan,
            "while": self.loop,
            "cond": self.branch,
        }[self.node.kind]()

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
            self.phase,
        )
        out = solved.plan.output_shardings
        return Decision(operands, out, out, (), (solved.plan,), solved.wants)

    # scan

    def scan(self) -> Decision:
        (body,) = self.node.bodies
        n_consts, n_carry = self.node.counts
        n_xs = n_consts + n_carry
        consts = [self.entering(i) for i in range(n_consts)]
        xs = [self.scanned(i) for i in range(n_xs, len(self.states))]
        inner_xs = [_shift(s, -1) for s in xs]
        wants = [
            w if j < n_carry else _shift_wants(w, -1) for j, w in enumerate(self.wants)
        ]
        n_ys = len(self.result_avals) - n_carry
        keep_ys = list(self.keep[n_carry:])

        def solve(carry: Sequence[Sharding], pin: bool) -> Solved:
            fixed = list(carry) if pin else [None] * n_carry
            carried = [_union(w, c) for w, c in zip(wants, carry, strict=False)]
            return self.solve(
                body,
                (*consts, *carry, *inner_xs),
                (*fixed, *[None] * n_ys),
                (*carried, *wants[n_carry:]),
                (*(True for _ in range(n_carry)), *keep_ys),
                self.phase,
            )

        positions = range(n_consts, n_xs)
        carry = self.carries(positions, lambda c: solve(c, False), wants)
        solved = solve(carry, True)
        ys = solved.plan.output_shardings[n_carry:]
        out = (*carry, *(_shift(y, 1) for y in ys))
        back = tuple(
            w if i < n_xs else _shift_wants(w, 1) for i, w in enumerate(solved.wants)
        )
        return Decision((*consts, *carry, *xs), out, out, (), (solved.plan,), back)

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
        n_test, n_body = self.node.counts
        start = n_test + n_body
        consts = [self.entering(i) for i in range(start)]
        nothing = [self.no_wants] * len(self.wants)

        def solve(carry: Sequence[Sharding], pin: bool) -> Solved:
            fixed = carry if pin else [None] * len(carry)
            return self.solve(
                body,
                (*consts[n_test:], *carry),
                tuple(fixed),
                tuple(_union(w, c) for w, c in zip(self.wants, carry, strict=True)),
                (False,) * len(carry),
                self.phase,
            )

        carry = self.carries(
            range(start, len(self.states)), lambda c: solve(c, False), self.wants, False
        )
        solved = solve(carry, True)
        tested = self.solve(
            test,
            (*consts[:n_test], *carry),
            (self.axes.replicated,),
            nothing[:1],
            (False,),
            self.phase,
        )
        wants = (*tested.wants[:n_test], *solved.wants)
        plans = (tested.plan, solved.plan)
        return Decision((*consts, *carry), carry, carry, (), plans, wants)

    def carries(
        self,
        positions: range,
        solve: Callable[[Sequence[Sharding]], Solved],
        wants: Sequence[Wants],
        may_sum: bool = True,
    ) -> tuple[Sharding, ...]:
        """The fixpoint of the carries' shardings, from their initial ones.

        A carry that starts replicated may become split, or a sum whose terms stay on
        their devices until after the loop, if the sums of the loop together are small.
        It changes at most twice, so that the fixpoint ends; whatever it ends at is
        correct, since the body's results are moved back to it.
        """
        avals = [self.operand_avals[i] for i in positions]
        carry = [self.entering(i) for i in positions]
        sums = self.sums(carry, avals, solve) if may_sum else []
        for k, (state, aval) in enumerate(zip(carry, avals, strict=True)):
            if k in sums:
                carry[k] = (Unreduced(),) * len(self.axes.names)
            elif all(s is None for s in state):
                carry[k] = reduced_to_wanted(state, wants[k], aval, self.axes)
        history: list[set[AxisSharding]] = [set(s) for s in carry]
        for _ in range(CARRY_ROUNDS):
            made = solve(carry).plan.output_shardings
            joined = [
                self.join(old, new, wants[k], avals[k], history[k])
                for k, (old, new) in enumerate(zip(carry, made, strict=False))
            ]
            if joined == carry:
                break
            carry = joined
        return tuple(carry)

    def sums(
        self,
        carry: Sequence[Sharding],
        avals: Sequence[Any],
        solve: Callable[[Sequence[Sharding]], Solved],
    ) -> list[int]:
        """The carries that can stay unreduced until after the loop, if all may."""
        (body,) = self.node.bodies
        plan = solve(carry).plan
        reduced_into = _reduced_into(body, plan, self.rule)
        found = [
            k
            for k, (state, made) in enumerate(
                zip(carry, plan.output_shardings, strict=False)
            )
            if all(s is None for s in state)
            and (k in reduced_into or any(isinstance(s, Unreduced) for s in made))
        ]
        size = sum(self.size(avals[k]) * itemsize(avals[k]) for k in found)
        if not found or size > LOOP_BYTES:
            return []
        terms = tuple(Unreduced() for _ in self.axes.names)
        trial = [terms if k in found else s for k, s in enumerate(carry)]
        made = solve(trial).plan.output_shardings
        return [k for k in found if made[k] == terms]

    def join(
        self,
        old: Sharding,
        new: Sharding,
        wants: Wants,
        aval: Any,
        history: set[AxisSharding],
    ) -> Sharding:
        """One carry's sharding for the next round."""
        out = old
        for axis, (a, b) in enumerate(zip(old, new, strict=True)):
            if a == b:
                continue
            state: AxisSharding = a
            if isinstance(a, Unreduced):
                state = None
            elif a is None and isinstance(b, Unreduced):
                state = _preferred(wants[axis])
            elif a is None:
                state = b
            elif isinstance(b, Split) and a.stored and not b.stored:
                state = b
            fits = not isinstance(state, Split) or can_split(
                aval.shape, on_axis(out, axis, None), axis, state, self.axes
            )
            revisits = state in history and state is not None
            state = state if fits and (state == a or not revisits) else None
            if state is not None:
                history.add(state)
            out = on_axis(out, axis, state)
        return out

    # cond

    def branch(self) -> Decision:
        index = self.axes.replicated
        operands = tuple(self.entering(i) for i in range(1, len(self.states)))
        count = len(self.result_avals)

        def solve(required: Sequence[Sharding | None]) -> list[Solved]:
            return [
                self.solve(
                    body, operands, required, self.wants, (False,) * count, self.phase
                )
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


def _reduced_into(
    body: Program, plan: BodyPlan, rule_of: Callable[[Node], OpShardingRule | None]
) -> set[int]:
    """The outputs of a body that are linear in something that the body reduces."""
    linear: set[int] = set()
    for step in plan.steps:
        if isinstance(step, Reshard):
            if any(isinstance(s, Unreduced) for s in step.path[0]):
                linear.add(step.source.value)
            continue
        node = body.nodes[step.node]
        rule = rule_of(node) if node.kind == "op" else None
        if rule is None:
            continue
        passing = [node.inputs[i] for group in rule.linear for i in group]
        if not linear.isdisjoint(v for v in passing if isinstance(v, int)):
            linear.update(node.outputs)
    outputs = enumerate(body.outputs)
    return {j for j, atom in outputs if isinstance(atom, int) and atom in linear}


def reduced(state: Sharding, wants: Wants, aval: Any, axes: Axes) -> Sharding:
    """`state` with unreduced axes split as wanted, or else replicated."""
    out = state
    for axis, s in enumerate(state):
        if isinstance(s, Unreduced):
            out = on_axis(out, axis, None)
            split = _preferred(wants[axis])
            if split and can_split(aval.shape, out, axis, split, axes):
                out = on_axis(out, axis, split)
    return out


def reduced_to_wanted(state: Sharding, wants: Wants, aval: Any, axes: Axes) -> Sharding:
    """A replicated `state`, split as its consumers want it if none wants it whole."""
    for axis, opinions in enumerate(wants):
        split = _preferred(opinions)
        if split is None or None in opinions:
            continue
        if can_split(aval.shape, state, axis, split, axes):
            state = on_axis(state, axis, split)
    return state


def _preferred(opinions: frozenset[Split | None]) -> Split | None:
    """The split that most of a value's cost hangs on: a stored one before a batch
    one."""
    splits = [s for s in opinions if s is not None]
    return min(splits, key=lambda s: (not s.stored, s.dim)) if splits else None


def _union(wants: Wants, state: Sharding) -> Wants:
    return tuple(
        w | {s} if isinstance(s, Split) else w
        for w, s in zip(wants, state, strict=True)
    )


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
