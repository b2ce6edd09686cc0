"""The backward half of propagation: what consumers prefer of every value.

In: a program and every node's decision. Out: per value, the shardings that its
consumers take without a move, and the unreduced values that should be reduced where
they are made. Each round goes from the nodes that were decided to those that what they
ask of their operands matters to, and no further.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardfn._core.program import Node, Program
from shardfn._core.resharding import can_split
from shardfn._core.sharding import (
    Axes,
    Sharding,
    Unreduced,
    is_unreduced,
)
from shardfn._core.sizes import elements, nbytes
from shardfn._propagation.agenda import Agenda, Uses
from shardfn._propagation.asked import Asked, ValueAxis
from shardfn._propagation.decision import Decision
from shardfn._propagation.operand_preferences import flow_preferences, op_preferences
from shardfn._propagation.preferences import Preferences, either


@dataclass(slots=True)
class Said:
    """What is said of values to the next forward round.

    Attributes:
      preferences: per value, what its consumers prefer; absent if they are free.
      reduce_at_producer: unreduced values, per mesh axis, to be reduced there.
    """

    preferences: dict[int, Preferences] = field(default_factory=dict)
    reduce_at_producer: set[ValueAxis] = field(default_factory=set)


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

    def join(self, one: Preferences, other: Preferences) -> Preferences:
        """What either prefers."""
        if one is other:
            return one
        pair = one, other
        joined = self.joined.get(pair)
        if joined is None:
            self.joined[pair] = joined = either(one, other)
        return joined


@dataclass(frozen=True, slots=True)
class _Terms:
    """What a node does with its unreduced operands along one mesh axis.

    Attributes:
      axis: the mesh axis.
      passed: those that it takes as terms.
      stopped: those of which it needs the sum.
      share: the bytes to move for each of `passed` if it is left to this node.
      merges: whether what is left to it is added to another unreduced value.
    """

    axis: int
    passed: frozenset[int]
    stopped: frozenset[int]
    share: float
    merges: bool


@dataclass(slots=True)
class Backward:
    """The backward half while one program is solved.

    Attributes:
      program: the program.
      uses: who makes and reads its values.
      decisions: one per node; the forward half writes them.
      env: shardings of its values; so it does these.
      axes: the mesh axes.
      memo: what equal equations share.
      asked: what is asked of what the program returns.
      said: what was said to the forward half.
      preferences: what is preferred by what was decided last; `said` may say more.
      reduced: the same of sums that are to be reduced where they are made.
      passed: per node, what it prefers of its operands.
      terms: per node that has unreduced operands, what it does with them.
      stale: values of whose consumers one asks something else than before.
      cost: bytes to move for a sum: if it is left to its consumers (an all-reduce moves
        twice what a reduce-scatter does) or reduced where it is made.
      merges: sums that a consumer adds to another unreduced value.
    """

    program: Program
    uses: Uses
    decisions: Sequence[Decision]
    env: Mapping[int, Sharding]
    axes: Axes
    memo: Memo
    asked: Asked
    said: Said = field(default_factory=Said)
    preferences: dict[int, Preferences] = field(default_factory=dict)
    reduced: set[ValueAxis] = field(default_factory=set)
    passed: dict[int, tuple[Preferences, ...]] = field(default_factory=dict)
    terms: dict[int, tuple[_Terms, ...]] = field(default_factory=dict)
    stale: set[int] = field(init=False)
    cost: dict[ValueAxis, float] = field(default_factory=dict)
    merges: set[ValueAxis] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.stale = set(self.asked.preferences)

    def go(self, decided: Iterable[int], grows: bool) -> set[int]:
        """One round.

        Args:
          decided: the nodes that were decided since the last one.
          grows: whether preferences can only grow from now on.

        Returns:
          The values of which something else is said than before.
        """
        decided, seen = frozenset(decided), set[int]()
        agenda = Agenda(decided, last_first=True)
        for index in agenda:
            node = self.program.nodes[index]
            for value in node.outputs:
                if index in decided or value in self.stale:
                    self.gather(value)
                    self.choose_reduction(value, node)
                    seen.add(value)
            for value in self.visit(index, node):
                self.stale.add(value)
                if (maker := self.uses.makers.get(value)) is not None:
                    agenda.add(maker)
            self.stale.difference_update(node.outputs)
        for value in self.stale:  # arguments
            self.gather(value)
        seen |= self.stale
        self.stale.clear()
        return {value for value in seen if self.say(value, grows)}

    def say(self, value: int, grows: bool) -> bool:
        """Says to it what was found of a value; whether that is new."""
        was, now = self.said.preferences.get(value), self.preferences.get(value)
        if grows and was is not None:
            now = was if now is None else self.memo.join(was, now)
        if now is None:
            self.said.preferences.pop(value, None)
        else:
            self.said.preferences[value] = now
        axes = range(len(self.axes.names))
        sums = {(value, axis) for axis in axes if (value, axis) in self.reduced}
        new = sums - self.said.reduce_at_producer
        self.said.reduce_at_producer |= new
        return now != was or bool(new)

    def gather(self, value: int) -> None:
        """What all consumers of a value prefer together."""
        found = self.asked.preferences.get(value)
        for index, i in self.uses.readers.get(value, ()):
            preferences = self.passed[index][i]
            found = self.memo.join(found or preferences, preferences)
        if found is not None and any(found):
            self.preferences[value] = found
        else:
            self.preferences.pop(value, None)

    def unreduced(self, value: int, axis: int) -> bool:
        return isinstance(self.env[value][axis], Unreduced)

    def choose_reduction(self, value: int, node: Node) -> None:
        """All consumers of `value` are known: is it better reduced now or by them?"""
        for axis in range(len(self.axes.names)):
            self.cost.pop((value, axis), None)
            self.merges.discard((value, axis))
            self.reduced.discard((value, axis))
        if not is_unreduced(self.env[value]):
            return
        aval = self.program.avals[value]
        preferences = self.preferences.get(value)
        readers = dict.fromkeys(index for index, _ in self.uses.readers.get(value, ()))
        each = [terms for index in readers for terms in self.terms.get(index, ())]
        for axis in range(len(self.axes.names)):
            place = value, axis
            if not self.unreduced(value, axis):
                continue
            scatters = preferences is not None and any(
                w is not None
                and can_split(aval.shape, self.axes.replicated, axis, w, self.axes)
                for w in preferences[axis]
            )
            own = nbytes(aval) * (1 if scatters else 2)
            left = [t for t in each if t.axis == axis and value in t.passed]
            deferred = sum(terms.share for terms in left)
            merged = any(terms.merges for terms in left)
            waits = not self.blocked(value, axis, node, each) and (
                deferred < own or (merged and deferred <= own)
            )
            self.cost[place] = deferred if waits else own
            if not waits:
                self.reduced.add(place)
            elif merged:
                self.merges.add(place)

    def blocked(
        self, value: int, axis: int, node: Node, each: Sequence[_Terms]
    ) -> bool:
        """Whether somebody needs the sum of `value`, or its node makes only sums."""
        if (value, axis) in self.asked.blocked:
            return True
        if node.rule is not None and node.rule.terms:
            return True
        return any(terms.axis == axis and value in terms.stopped for terms in each)

    def visit(self, index: int, node: Node) -> set[int]:
        """Notes what a node asks of its operands; those of which it is something
        else than before."""
        decision, before = self.decisions[index], self.passed.get(index)
        now = self.prefers(node, decision)
        changed = {
            atom
            for i, atom in enumerate(node.inputs)
            if isinstance(atom, int) and (before is None or before[i] != now[i])
        }
        self.passed[index] = now
        operands = [atom for atom in node.inputs if isinstance(atom, int)]
        sums = any(is_unreduced(self.env[atom]) for atom in operands)
        terms = tuple(self.terms_of(node, decision)) if sums else ()
        if terms != self.terms.get(index, ()):
            changed.update(operands)
            self.terms[index] = terms
        return changed

    def terms_of(self, node: Node, decision: Decision) -> Iterable[_Terms]:
        """What a node does with unreduced operands, along each mesh axis."""
        for axis in range(len(self.axes.names)):
            passed, stopped = set[int](), set[int]()
            for i, atom in enumerate(node.inputs):
                if isinstance(atom, int) and self.unreduced(atom, axis):
                    stays = isinstance(decision.operands[i][axis], Unreduced)
                    (passed if stays else stopped).add(atom)
            results = [(r, axis) for r in node.outputs]
            total = sum(self.cost.get(r, 0.0) for r in results)
            if node.rule is not None and node.rule.terms:
                total = 0.0
            merges = len(passed) > 1 or any(r in self.merges for r in results)
            share = total / max(len(passed), 1)
            yield _Terms(axis, frozenset(passed), frozenset(stopped), share, merges)

    def prefers(self, node: Node, decision: Decision) -> tuple[Preferences, ...]:
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
