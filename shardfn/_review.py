"""The backward half of propagation: what consumers want of every value.

In: a program and every node's decision. Out: per value, the shardings that its
consumers take without a move, and the unreduced values that should be reduced where
they are made.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shardfn._decide import Decision, elements, filled_factors, nbytes
from shardfn._program import Node, Program
from shardfn._reshard import can_split
from shardfn._rule import OpShardingRule
from shardfn._sharding import Axes, Sharding, Split, Unreduced, flat_start
from shardfn._want import Wants

Place = tuple[int, int]
"""A value and a mesh axis."""


@dataclass(frozen=True, slots=True)
class Reviewed:
    """What a backward pass found.

    Attributes:
      wants: per value, what its consumers want; absent if none has an opinion.
      settled: unreduced values, per mesh axis, to be reduced where they are made.
    """

    wants: dict[int, Wants]
    settled: frozenset[Place]


def review(
    program: Program,
    decisions: Sequence[Decision],
    env: dict[int, Sharding],
    required: Sequence[Sharding | None],
    out_wants: Sequence[Wants],
    keep: Sequence[bool],
    axes: Axes,
) -> Reviewed:
    """Goes through the program backwards, from what is wanted of its outputs."""
    pass_ = _Pass(program, env, axes)
    for j, atom in enumerate(program.outputs):
        if isinstance(atom, int):
            pass_.output(atom, required[j], out_wants[j], keep[j])
    for node, decision in zip(
        reversed(program.nodes), reversed(decisions), strict=True
    ):
        for value in node.outputs:
            pass_.born(value)
        pass_.node(node, decision)
    return Reviewed(pass_.wants, frozenset(pass_.settled))


@dataclass(slots=True)
class _Pass:
    """State of one backward pass.

    `late` holds, per unreduced value, the bytes to move if it is left to its consumers
    (an all-reduce moves twice what a reduce-scatter does), `blocked` the values of
    which some consumer needs the sum, `merges` those that a consumer adds to another
    unreduced value. Equal wants are one object: there are many values.
    """

    program: Program
    env: dict[int, Sharding]
    axes: Axes
    wants: dict[int, Wants] = field(default_factory=dict)
    known: dict[Wants, Wants] = field(default_factory=dict)
    settled: set[Place] = field(default_factory=set)
    late: dict[Place, float] = field(default_factory=dict)
    cost: dict[Place, float] = field(default_factory=dict)
    blocked: set[Place] = field(default_factory=set)
    merges: set[Place] = field(default_factory=set)

    def add(self, value: int, axis: int, want: Split | None) -> None:
        old = self.wants.get(value, (frozenset(),) * len(self.axes.names))
        if want not in old[axis]:
            new = (*old[:axis], old[axis] | {want}, *old[axis + 1 :])
            self.wants[value] = self.known.setdefault(new, new)

    def unreduced(self, value: int, axis: int) -> bool:
        return isinstance(self.env[value][axis], Unreduced)

    def output(
        self, value: int, fixed: Sharding | None, wants: Wants, keep: bool
    ) -> None:
        for axis in range(len(self.axes.names)):
            state = fixed[axis] if fixed is not None else None
            opinions = {state} if isinstance(state, Split) else wants[axis]
            for want in opinions:
                self.add(value, axis, want)
            if not self.unreduced(value, axis):
                continue
            may_stay = keep and (fixed is None or isinstance(state, Unreduced))
            if not may_stay:
                self.blocked.add((value, axis))

    def born(self, value: int) -> None:
        """All consumers of `value` are known: is it better reduced now or by them?"""
        aval = self.program.avals[value]
        wants = self.wants.get(value)
        for axis in range(len(self.axes.names)):
            place = (value, axis)
            if not self.unreduced(value, axis):
                continue
            scatters = wants is not None and any(
                w is not None
                and can_split(aval.shape, self.axes.replicated, axis, w, self.axes)
                for w in wants[axis]
            )
            own = nbytes(aval) * (1 if scatters else 2)
            late = self.late.get(place, 0.0)
            merged = place in self.merges
            waits = place not in self.blocked and (
                late < own or (merged and late <= own)
            )
            self.cost[place] = late if waits else own
            if not waits:
                self.settled.add(place)
                self.merges.discard(place)

    def node(self, node: Node, decision: Decision) -> None:
        for axis in range(len(self.axes.names)):
            self.terms(node, decision, axis)
            if node.kind != "op":
                self.flow(node, decision, axis)
            elif node.rule is not None:
                self.op(node, decision, node.rule, axis)
            else:
                for atom in node.inputs:
                    if isinstance(atom, int):
                        self.add(atom, axis, None)

    def terms(self, node: Node, decision: Decision, axis: int) -> None:
        """Notes what it costs to leave unreduced operands to this node."""
        passed, stopped = set(), set()
        for i, atom in enumerate(node.inputs):
            if isinstance(atom, int) and self.unreduced(atom, axis):
                stays = isinstance(decision.operands[i][axis], Unreduced)
                (passed if stays else stopped).add(atom)
        self.blocked.update((v, axis) for v in stopped)
        if not passed:
            return
        results = [(r, axis) for r in node.outputs]
        total = sum(self.cost.get(r, 0.0) for r in results)
        merging = len(passed) > 1 or any(r in self.merges for r in results)
        for value in passed:
            place = (value, axis)
            self.late[place] = self.late.get(place, 0.0) + total / len(passed)
            if merging:
                self.merges.add(place)

    def flow(self, node: Node, decision: Decision, axis: int) -> None:
        for i, atom in enumerate(node.inputs):
            state = decision.operands[i][axis]
            if not isinstance(atom, int) or isinstance(state, Unreduced):
                continue
            for want in decision.wants[i][axis]:
                self.add(atom, axis, want)
            if isinstance(state, Split):
                self.add(atom, axis, state)

    def op(
        self, node: Node, decision: Decision, rule: OpShardingRule, axis: int
    ) -> None:
        chosen = any(a == axis for _, a in decision.parts)
        filled = filled_factors(rule, decision.parts, self.axes)
        for i, atom in enumerate(node.inputs):
            if not isinstance(atom, int) or not elements(self.program.avals[atom]):
                continue
            state = decision.operands[i][axis]
            if isinstance(state, Split):
                self.add(atom, axis, state)
            elif chosen and state is None:
                self.add(atom, axis, None)
            elif not chosen:
                self.passed_back(node, rule, i, atom, axis, filled)

    def passed_back(
        self,
        node: Node,
        rule: OpShardingRule,
        i: int,
        atom: int,
        axis: int,
        filled: frozenset[str],
    ) -> None:
        """What consumers of the results want, in terms of operand `i`."""
        for dims, result in zip(rule.results, node.outputs, strict=True):
            sets = self.wants.get(result)
            for want in sets[axis] if sets else ():
                through = _through(rule, dims, rule.operands[i], want, filled)
                self.add(atom, axis, through)


def _through(
    rule: OpShardingRule,
    result: Any,
    operand: Any,
    want: Split | None,
    filled: frozenset[str],
) -> Split | None:
    """The split of an operand that makes the result split as wanted."""
    if want is None:
        return None
    start = flat_start(want.dim)
    if start is not None:
        keeps = rule.flat and len(operand) > start and operand[:start] == result[:start]
        return want if keeps else None
    factor = rule.major(result, want.dim, filled)
    if factor is None or not rule.is_splittable(factor, filled):
        return None
    dim = rule.dim_of(operand, factor)
    return None if dim is None else Split(dim, want.stored)
