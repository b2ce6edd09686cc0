"""The rounds in which the shardings of one program's values are found.

In: a program, the shardings of its arguments, those that its results must have, and how
each node is decided. Out: its plan, and what it prefers its arguments in.

Each round goes forward, deciding every node from its operands, then backward, noting
what consumers prefer of each value and which unreduced values should be reduced where
they are made, until a round changes nothing. Any round's decisions are a correct plan.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardfn._core.limits import FREE_ROUNDS
from shardfn._core.program import Program, aval_of
from shardfn._core.reasons import Note
from shardfn._core.sent_bytes import sent
from shardfn._core.sharding import Sharding
from shardfn._propagation.backward import BackwardResult, Memo, propagate_backward
from shardfn._propagation.decide_node import Decider
from shardfn._propagation.decision import Decision
from shardfn._propagation.flow_site import Solved
from shardfn._propagation.insert_reshards import plan_steps
from shardfn._propagation.preferences import Preferences, reduced

GREW = Note(
    "propagate",
    f"what is preferred of it still changed after {FREE_ROUNDS} rounds, and could only "
    "grow from then on (limits.FREE_ROUNDS)",
)


@dataclass(slots=True)
class Rounds:
    """One program while it is solved.

    Attributes:
      program: the program.
      inputs: shardings of its arguments.
      required: shardings that its outputs must have; None for any.
      output_preferences: what the consumers of its outputs would take.
      may_stay_unreduced: the mesh axes along which an output may stay so.
      decider: decides its nodes.
      memo: what backward passes share.
      decisions: those of its nodes, in order.
    """

    program: Program
    inputs: Sequence[Sharding]
    required: Sequence[Sharding | None]
    output_preferences: Sequence[Preferences]
    may_stay_unreduced: Sequence[frozenset[int]]
    decider: Decider
    memo: Memo
    decisions: list[Decision] = field(default_factory=list)

    def solve(self) -> Solved:
        """The plan, and what the program prefers its arguments in.

        Rows that a step makes itself are whole in the first round, and split once their
        consumers ask for it. What that round reduced, as it met something whole, may
        join other terms by now: then all begins again with such rows split, and the
        plan that sends less counts.
        """
        self.decider.env.update(zip(self.program.inputs, self.inputs, strict=True))
        replicated = self.decider.axes.replicated
        self.decider.env.update((v, replicated) for v, _ in self.program.constants)
        (first, backward), early = self._solved({})
        if not early:
            return first
        asked = backward.preferences
        rows = self.decider.free & asked.keys()
        (second, _), _ = self._solved({v: asked[v] for v in rows})
        return min((first, second), key=self._price)

    def _price(self, solved: Solved) -> float:
        return sent(self.program, solved.plan, self.decider.axes).price

    def _solved(
        self, start: Mapping[int, Preferences]
    ) -> tuple[tuple[Solved, BackwardResult], bool]:
        """What rounds from a start find, and whether early ones reduced what the last
        one would not."""
        backward, early = self._last_round(start)
        plan = plan_steps(
            self.program,
            self.inputs,
            self.decisions,
            self.decider.env,
            [self.output(j, backward) for j in range(len(self.required))],
            self.decider.axes,
        )
        preferences, nothing = backward.preferences, self.decider.nothing
        each = (preferences.get(v, nothing) for v in self.program.inputs)
        return (Solved(plan, tuple(each)), backward), early

    def _last_round(
        self, start: Mapping[int, Preferences]
    ) -> tuple[BackwardResult, bool]:
        """Goes through the program until a round changes nothing.

        Args:
          start: what is preferred of values in the first round.

        Returns:
          What the last round found, and whether an early one reduced something where it
          is made that the last one would not.
        """
        backward = BackwardResult(dict(start), frozenset())
        self.decide_all(backward)
        for round_ in itertools.count(1):
            free = self.propagate_backward()
            preferences = (
                free.preferences if round_ <= FREE_ROUNDS else free.grown(backward)
            )
            found = BackwardResult(
                preferences, free.reduce_at_producer | backward.reduce_at_producer
            )
            changes = found.changes(backward)
            if not changes:
                self.note_grown(preferences, free.preferences)
                return backward, free.reduce_at_producer != backward.reduce_at_producer
            backward = found
            self.decide_changed(backward, changes)
        raise AssertionError("the rounds have no end")

    def propagate_backward(self) -> BackwardResult:
        """Goes backward over what a forward round decided."""
        return propagate_backward(
            self.program,
            self.decisions,
            self.decider.env,
            self.required,
            self.output_preferences,
            self.may_stay_unreduced,
            self.decider.axes,
            self.memo,
        )

    def note_grown(
        self, preferences: dict[int, Preferences], free: dict[int, Preferences]
    ) -> None:
        """Says where `preferences` are other than the last round by itself found."""
        grown = {v for v, each in preferences.items() if free.get(v) != each}
        if not grown:
            return
        for i, node in enumerate(self.program.nodes):
            if not grown.isdisjoint(node.outputs):
                decision = self.decisions[i]
                notes = (*decision.notes, GREW)
                self.decisions[i] = replace(decision, notes=notes)

    def output(self, j: int, backward: BackwardResult) -> Sharding:
        """The sharding in which output `j` is returned."""
        fixed, atom = self.required[j], self.program.outputs[j]
        if fixed is not None:
            return fixed
        state = self.decider.state(atom)
        preferences, aval = self.output_preferences[j], aval_of(self.program, atom)
        done = reduced(state, preferences, aval, self.decider.axes)
        stays = self.may_stay_unreduced[j]
        each = enumerate(zip(state, done, strict=True))
        return tuple(s if axis in stays else d for axis, (s, d) in each)

    def decide_all(self, backward: BackwardResult) -> None:
        """Decides every node in order; also the sharding of every value."""
        self.decisions.clear()
        for node in self.program.nodes:
            decision = self.decider.decide(node, backward)
            self.decisions.append(decision)
            self.decider.env.update(zip(node.outputs, decision.results, strict=True))

    def decide_changed(self, backward: BackwardResult, changes: set[int]) -> None:
        """Decides again what depends on `changes`, the values of which the backward
        half says something new, or on a value whose sharding changes thereby."""
        moved: set[int] = set()
        for index, node in enumerate(self.program.nodes):
            inputs = [a for a in node.inputs if isinstance(a, int)]
            same = changes.isdisjoint(node.outputs) and moved.isdisjoint(inputs)
            # Bodies of control flow are given what is preferred of operands, too.
            if same and (node.kind == "op" or changes.isdisjoint(inputs)):
                continue
            decision = self.decider.decide(node, backward)
            self.decisions[index] = decision
            for value, state in zip(node.outputs, decision.results, strict=True):
                if self.decider.env[value] != state:
                    self.decider.env[value] = state
                    moved.add(value)
