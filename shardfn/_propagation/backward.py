"""The backward half of propagation: what consumers prefer of every value.

In: a program and every node's decision. Out: per value, the shardings that its
consumers take without a move, and the unreduced values that should be reduced where
they are made.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shardfn._core.program import Node, Program
from shardfn._core.resharding import can_split
from shardfn._core.sharding import (
    Axes,
    Sharding,
    Split,
    Unreduced,
    is_unreduced,
)
from shardfn._core.sizes import elements, nbytes
from shardfn._propagation.decision import Decision
from shardfn._propagation.operand_preferences import flow_preferences, op_preferences
from shardfn._propagation.preferences import Preferences

ValueAxis = tuple[int, int]
"""A value and a mesh axis."""


@dataclass(frozen=True, slots=True)
class BackwardResult:
    """What a backward pass found.

    Attributes:
      preferences: per value, what its consumers prefer; absent if they are free.
      reduce_at_producer: unreduced values, per mesh axis, to be reduced there.
    """

    preferences: dict[int, Preferences]
    reduce_at_producer: frozenset[ValueAxis]

    def changes(self, before: "BackwardResult") -> set[int]:
        """The values of which it says something else than a pass before it."""
        values = {
            value for value, _ in self.reduce_at_producer ^ before.reduce_at_producer
        }
        values.update(before.preferences.keys() - self.preferences.keys())
        was = before.preferences.get
        values.update(
            v for v, preferences in self.preferences.items() if was(v) != preferences
        )
        return values

    def grown(self, before: "BackwardResult") -> dict[int, Preferences]:
        """What is preferred of every value, or was by a pass before it."""
        preferences = dict(before.preferences)
        for value, now in self.preferences.items():
            was = preferences.get(value, now)
            preferences[value] = tuple(a | b for a, b in zip(was, now, strict=True))
        return preferences


@dataclass(slots=True)
class Memo:
    """What equal equations share in every backward pass over one step.

    Attributes:
      passed: what an op prefers of its operands, by its decision and by what is
        preferred of its results. Equal equations share a decision, which the solver
        keeps alive.
      joined: what two consumers prefer together.
    """

    passed: dict[tuple[Any, ...], tuple[Preferences, ...]] = field(default_factory=dict)
    joined: dict[tuple[Preferences, Preferences], Preferences] = field(
        default_factory=dict
    )


def propagate_backward(
    program: Program,
    decisions: Sequence[Decision],
    env: dict[int, Sharding],
    required: Sequence[Sharding | None],
    output_preferences: Sequence[Preferences],
    may_stay_unreduced: Sequence[frozenset[int]],
    axes: Axes,
    memo: Memo,
) -> BackwardResult:
    """Goes through the program backwards, from what is preferred of its outputs."""
    pass_ = _Pass(program, env, axes, memo)
    for j, atom in enumerate(program.outputs):
        if isinstance(atom, int):
            pass_.output(
                atom, required[j], output_preferences[j], may_stay_unreduced[j]
            )
    for node, decision in zip(
        reversed(program.nodes), reversed(decisions), strict=True
    ):
        pass_.node(node, decision)
    return BackwardResult(pass_.preferences, frozenset(pass_.reduce_at_producer))


@dataclass(slots=True)
class _Pass:
    """State of one backward pass.

    `sums` holds the values that are unreduced along some axis. `deferred` is, for each
    of them, the bytes to move if it is left to its consumers (an all-reduce moves twice
    what a reduce-scatter does), `blocked` those of which some consumer needs the sum,
    `merges` those that a consumer adds to another unreduced value.
    """

    program: Program
    env: dict[int, Sharding]
    axes: Axes
    memo: Memo
    preferences: dict[int, Preferences] = field(default_factory=dict)
    sums: set[int] = field(init=False)
    reduce_at_producer: set[ValueAxis] = field(default_factory=set)
    deferred: dict[ValueAxis, float] = field(default_factory=dict)
    cost: dict[ValueAxis, float] = field(default_factory=dict)
    blocked: set[ValueAxis] = field(default_factory=set)
    merges: set[ValueAxis] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.sums = {
            value for value, sharding in self.env.items() if is_unreduced(sharding)
        }

    def add(self, value: int, preferences: Preferences) -> None:
        """Notes what one more consumer of `value` prefers."""
        old = self.preferences.get(value)
        if old is None:
            if any(preferences):
                self.preferences[value] = preferences
        elif old is not preferences:
            pair = old, preferences
            joined = self.memo.joined.get(pair)
            if joined is None:
                joined = tuple(a | b for a, b in zip(*pair, strict=True))
                self.memo.joined[pair] = joined
            self.preferences[value] = joined

    def unreduced(self, value: int, axis: int) -> bool:
        return isinstance(self.env[value][axis], Unreduced)

    def output(
        self,
        value: int,
        fixed: Sharding | None,
        preferences: Preferences,
        may_stay_unreduced: frozenset[int],
    ) -> None:
        states = fixed if fixed is not None else self.axes.replicated
        given = (
            frozenset({s}) if isinstance(s, Split) else opinions
            for s, opinions in zip(states, preferences, strict=True)
        )
        self.add(value, tuple(given))
        for axis, state in enumerate(states):
            if not self.unreduced(value, axis):
                continue
            may_stay = axis in may_stay_unreduced and (
                fixed is None or isinstance(state, Unreduced)
            )
            if not may_stay:
                self.blocked.add((value, axis))

    def choose_reduction(self, value: int) -> None:
        """All consumers of `value` are known: is it better reduced now or by them?"""
        aval = self.program.avals[value]
        preferences = self.preferences.get(value)
        for axis in range(len(self.axes.names)):
            place = (value, axis)
            if not self.unreduced(value, axis):
                continue
            scatters = preferences is not None and any(
                w is not None
                and can_split(aval.shape, self.axes.replicated, axis, w, self.axes)
                for w in preferences[axis]
            )
            own = nbytes(aval) * (1 if scatters else 2)
            deferred = self.deferred.get(place, 0.0)
            merged = place in self.merges
            waits = place not in self.blocked and (
                deferred < own or (merged and deferred <= own)
            )
            self.cost[place] = deferred if waits else own
            if not waits:
                self.reduce_at_producer.add(place)
                self.merges.discard(place)

    def node(self, node: Node, decision: Decision) -> None:
        waits = node.rule is not None and bool(node.rule.terms)
        for value in node.outputs:
            if value in self.sums:
                each = range(len(self.axes.names)) if waits else ()
                self.blocked.update((value, axis) for axis in each)
                self.choose_reduction(value)
        if any(isinstance(a, int) and a in self.sums for a in node.inputs):
            for axis in range(len(self.axes.names)):
                self.terms(node, decision, axis)
        for atom, preferences in zip(
            node.inputs, self.passed(node, decision), strict=True
        ):
            if isinstance(atom, int):
                self.add(atom, preferences)

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
        if node.rule is not None and node.rule.terms:
            total = 0.0
        merging = len(passed) > 1 or any(r in self.merges for r in results)
        for value in passed:
            place = (value, axis)
            self.deferred[place] = self.deferred.get(place, 0.0) + total / len(passed)
            if merging:
                self.merges.add(place)

    def passed(self, node: Node, decision: Decision) -> tuple[Preferences, ...]:
        """What a node prefers of its operands, by what is preferred of its results."""
        if node.kind != "op":
            return tuple(map(flow_preferences, decision.preferences, decision.operands))
        if node.rule is None:
            return ((frozenset({None}),) * len(self.axes.names),) * len(node.inputs)
        results = tuple(map(self.preferences.get, node.outputs))
        key = id(decision), results
        known = self.memo.passed.get(key)
        if known is None:
            sizes = [elements(v.aval) for v in node.eqn.invars]
            known = op_preferences(node.rule, decision, sizes, results, self.axes)
            self.memo.passed[key] = known
        return known
