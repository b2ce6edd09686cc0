"""The rounds in which the shardings of one program's values are found.

In: a program, the shardings of its arguments, those that its results must have, and how
each node is decided. Out: its plan, and what it prefers its arguments in.

Each round goes forward, deciding every node from its operands, then backward, noting
what consumers prefer of each value and which unreduced values should be reduced where
they are made, until a round changes nothing. Either half visits only what a change
before it reaches. Any round's decisions are a correct plan.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from shardfn._core.limits import FREE_ROUNDS
from shardfn._core.program import Program, aval_of, number_of
from shardfn._core.reasons import Note
from shardfn._core.sent_bytes import sent
from shardfn._core.sharding import Sharding, Unreduced
from shardfn._propagation.agenda import Agenda, Uses
from shardfn._propagation.asked import Asked, ValueAxis
from shardfn._propagation.backward import Backward, Memo, Said
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
        backward = self.last_round({})
        first, asked = self.solved(backward.said), backward.said.preferences
        rows = self.decider.free & asked.keys()
        if not rows or not self.could_join(backward.said.reduce_at_producer):
            return first
        backward = self.last_round({v: asked[v] for v in rows})
        return min((first, self.solved(backward.said)), key=self.price)

    def could_join(self, early: Set[ValueAxis]) -> bool:
        """Whether sums that were reduced early, or what is linear in them, are added to
        other terms by now, or enter control flow, where they could be."""
        each = range(len(self.decider.axes.names))
        return any(self.joins({v for v, a in early if a == k}, k) for k in each)

    def joins(self, early: Set[int], axis: int) -> bool:
        """The same along one mesh axis. What is added to itself, as where a gradient or
        its clipped form is selected, is one sum however late it is reduced."""
        made_of = {value: frozenset({value}) for value in early}
        for node, decision in zip(self.program.nodes, self.decisions, strict=True):
            numbers = map(number_of, node.inputs)
            whole = {i: made_of[v] for i, v in enumerate(numbers) if v in made_of}
            if not whole:
                continue
            if node.passes_through:
                made_of.update((node.outputs[i], of) for i, of in whole.items())
            elif node.rule is None:
                return True
            else:
                each = enumerate(decision.operands)
                terms = {i for i, s in each if isinstance(s[axis], Unreduced)}
                both, of = terms | whole.keys(), frozenset[int]().union(*whole.values())
                linear = [g for g in node.rule.linear if both <= g]
                if linear and (len(of) > 1 or terms - whole.keys()):
                    return True
                if any(g == both for g in linear):
                    made_of.update((value, of) for value in node.outputs)
        return False

    def price(self, solved: Solved) -> float:
        """What a plan sends, before passes join small moves: both have as many chances
        for that."""
        return sent(self.program, solved.plan, self.decider.axes).price

    def solved(self, said: Said) -> Solved:
        """What the last round found."""
        plan = plan_steps(
            self.program,
            self.inputs,
            self.decisions,
            self.decider.env,
            [self.output(j) for j in range(len(self.required))],
            self.decider.axes,
        )
        nothing = self.decider.nothing
        each = (said.preferences.get(v, nothing) for v in self.program.inputs)
        return Solved(plan, tuple(each))

    def last_round(self, start: Mapping[int, Preferences]) -> Backward:
        """Goes through the program until a round changes nothing.

        Args:
          start: what is preferred of values in the first round.

        Returns:
          The backward half after the last round.
        """
        backward = self.backward(Said(dict(start)))
        self.decide_all(backward.said)
        decided: Iterable[int] = range(len(self.program.nodes))
        for round_ in itertools.count(1):
            changes = backward.go(decided, grows=round_ > FREE_ROUNDS)
            if not changes:
                break
            decided = self.decide_changed(backward, changes)
        self.note_grown(backward)
        return backward

    def backward(self, said: Said) -> Backward:
        """The backward half, before its first round."""
        axes = self.decider.axes
        asked = Asked.of(
            self.program,
            self.required,
            self.output_preferences,
            self.may_stay_unreduced,
            axes,
        )
        uses = Uses.of(self.program)
        given = self.decisions, self.decider.env, axes, self.memo
        return Backward(self.program, uses, *given, asked, said)

    def note_grown(self, backward: Backward) -> None:
        """Says where preferences are other than the last round by itself found."""
        free, said = backward.preferences, backward.said.preferences
        grown = {v for v, each in said.items() if free.get(v) != each}
        if not grown:
            return
        for i, node in enumerate(self.program.nodes):
            if not grown.isdisjoint(node.outputs):
                decision = self.decisions[i]
                notes = (*decision.notes, GREW)
                self.decisions[i] = replace(decision, notes=notes)

    def output(self, j: int) -> Sharding:
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

    def decide_all(self, said: Said) -> None:
        """Decides every node in order; also the sharding of every value."""
        self.decisions.clear()
        for node in self.program.nodes:
            decision = self.decider.decide(node, said)
            self.decisions.append(decision)
            self.decider.env.update(zip(node.outputs, decision.results, strict=True))

    def decide_changed(self, backward: Backward, changes: set[int]) -> set[int]:
        """Decides again what depends on `changes`, the values of which the backward
        half says something new, or on a value whose sharding changes thereby; the
        nodes that were."""
        nodes, uses = self.program.nodes, backward.uses
        agenda = Agenda(uses.makers[v] for v in changes if v in uses.makers)
        for value in changes:
            for index, _ in uses.readers.get(value, ()):
                # Bodies of control flow are given what is preferred of operands, too.
                if nodes[index].kind != "op":
                    agenda.add(index)
        for index in agenda:
            decision = self.decider.decide(nodes[index], backward.said)
            self.decisions[index] = decision
            made = zip(nodes[index].outputs, decision.results, strict=True)
            for value, state in made:
                if self.decider.env[value] != state:
                    self.decider.env[value] = state
                    for reader, _ in uses.readers.get(value, ()):
                        agenda.add(reader)
        return agenda.seen
