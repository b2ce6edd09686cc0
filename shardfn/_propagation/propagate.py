"""The rounds in which the shardings of a program's values are found.

In: a traced step, the shardings of its arguments, and those that its results must have.
Out: its plan, before any schedule pass. Touches no arrays.

Each round goes forward, deciding every node from its operands, then backward, noting
what consumers prefer of each value and which unreduced values should be reduced where
they are made, until a round changes nothing. Either half visits only what a change
before it reaches. Any round's decisions are a correct plan.
"""

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardfn._core.control import NOTHING_ASKED, Control
from shardfn._core.leaves import Names
from shardfn._core.limits import FREE_ROUNDS
from shardfn._core.plan import BodyPlan
from shardfn._core.program import Program, aval_of
from shardfn._core.reasons import Note
from shardfn._core.residual import feed_back_p
from shardfn._core.sharding import Axes, Sharding, Split
from shardfn._propagation.agenda import Agenda, Uses
from shardfn._propagation.asked import Asked
from shardfn._propagation.backward import Backward, Memo, Said
from shardfn._propagation.decide_node import Decider
from shardfn._propagation.decision import Decision
from shardfn._propagation.flow_site import Solved
from shardfn._propagation.free_values import free_values
from shardfn._propagation.insert_reshards import plan_steps
from shardfn._propagation.preferences import Preferences, reduced
from shardfn._propagation.stationary import is_stationary, least_sources

GREW = Note(
    "propagate",
    f"what is preferred of it still changed after {FREE_ROUNDS} rounds, and could only "
    "grow from then on (limits.FREE_ROUNDS)",
)


@dataclass(slots=True)
class Known:
    """What plans of one program share, however its arguments are stored, if all else
    that they are asked is the same: most of two such plans is.

    Attributes:
      ops: by equation, and by what is around it, what was decided.
      bodies: plans of control flow's bodies, by what `Solver.solve` is given.
      backward: what backward passes share; it knows decisions by their `id`.
      free: by program, see `free_in`.
    """

    ops: dict[Hashable, Decision] = field(default_factory=dict)
    bodies: dict[Hashable, Solved] = field(default_factory=dict)
    backward: Memo = field(default_factory=Memo)
    free: dict[int, frozenset[int]] = field(default_factory=dict)

    def free_in(self, program: Program) -> frozenset[int]:
        """The values of a program that are made of scalars and constants alone."""
        if id(program) not in self.free:
            self.free[id(program)] = free_values(program)
        return self.free[id(program)]


@dataclass(slots=True)
class Solver:
    """Solves the bodies of one traced step.

    Attributes:
      axes: the mesh axes.
      small: unreduced values with fewer elements are reduced as late as possible: they
        cost latency, not bytes.
      control: which sums of loops to leave unreduced until after them.
      whole: whether small sums behind stationary leaves are all-reduced.
      exchange: whether rows of the batch are exchanged where an op sends less so.
      fed: by leaf, the mesh axis along which gradients stay terms for a residual.
      known: what was decided before.
    """

    axes: Axes
    small: int
    control: Control
    whole: bool = False
    exchange: bool = True
    fed: Mapping[Names, int] = field(default_factory=dict)
    known: Known = field(default_factory=Known)

    def solve(
        self,
        program: Program,
        inputs: Sequence[Sharding],
        required: Sequence[Sharding | None],
        preferences: Sequence[Preferences],
        may_stay_unreduced: Sequence[frozenset[int]],
        shared: bool = True,
    ) -> Solved:
        """Plans one program.

        Args:
          program: the step, or a body of its control flow.
          inputs: shardings of its arguments.
          required: shardings that its outputs must have; None for any.
          preferences: what the consumers of its outputs would take.
          may_stay_unreduced: the mesh axes along which an output may stay so.
          shared: whether other plans share what is found.

        Returns:
          The plan, and what the program prefers its arguments in.
        """
        key = (
            id(program),
            tuple(inputs),
            tuple(required),
            tuple(preferences),
            tuple(may_stay_unreduced),
        )
        if key in self.known.bodies:
            return self.known.bodies[key]
        decider = self.decider(program, inputs)
        found = _Body(
            self,
            program,
            inputs,
            required,
            preferences,
            may_stay_unreduced,
            decider,
        ).solve()
        if shared:
            self.known.bodies[key] = found
        return found

    def decider(self, program: Program, inputs: Sequence[Sharding]) -> Decider:
        """Of the nodes of a program that is about to be solved."""
        axes = range(len(self.axes.names))
        stays = any(is_stationary(axis, inputs) for axis in axes)
        return Decider(
            program,
            {},
            self.axes,
            self.small,
            self.control,
            self.solve,
            self.known.ops,
            least_sources(program) if stays else {},
            self.known.free_in(program),
            self.whole and stays,
            self.exchange,
            self.fed,
        )


@dataclass(slots=True)
class _Body:
    """One program while it is solved."""

    solver: Solver
    program: Program
    inputs: Sequence[Sharding]
    required: Sequence[Sharding | None]
    output_preferences: Sequence[Preferences]
    may_stay_unreduced: Sequence[frozenset[int]]
    decider: Decider
    decisions: list[Decision] = field(default_factory=list)

    def solve(self) -> Solved:
        self.decider.env.update(zip(self.program.inputs, self.inputs, strict=True))
        replicated = self.solver.axes.replicated
        self.decider.env.update((v, replicated) for v, _ in self.program.constants)
        backward = self.backward()
        self.decide_all(backward.said)
        decided: Iterable[int] = range(len(self.program.nodes))
        for round_ in itertools.count(1):
            changes = backward.go(decided, grows=round_ > FREE_ROUNDS)
            if not changes:
                break
            decided = self.decide_changed(backward, changes)
        self.note_grown(backward)
        plan = plan_steps(
            self.program,
            self.inputs,
            self.decisions,
            self.decider.env,
            [self.output(j) for j in range(len(self.required))],
            self.solver.axes,
        )
        preferences = backward.said.preferences
        nothing = self.decider.nothing
        return Solved(
            plan, tuple(preferences.get(v, nothing) for v in self.program.inputs)
        )

    def backward(self) -> Backward:
        """The backward half, before its first round."""
        axes = self.solver.axes
        asked = Asked.of(
            self.program,
            self.required,
            self.output_preferences,
            self.may_stay_unreduced,
            axes,
        )
        return Backward(
            self.program,
            Uses.of(self.program),
            self.decisions,
            self.decider.env,
            axes,
            self.solver.known.backward,
            asked,
        )

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
        done = reduced(state, preferences, aval, self.solver.axes)
        stays = self.may_stay_unreduced[j]
        each = enumerate(zip(state, done, strict=True))
        return tuple(s if axis in stays else d for axis, (s, d) in each)

    def decide_all(self, said: Said) -> None:
        """Decides every node in order; also the sharding of every value."""
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


def propagate(
    program: Program,
    inputs: Sequence[Sharding],
    required: Sequence[Sharding | None],
    axes: Axes,
    small: int,
    control: Control = NOTHING_ASKED,
    whole: bool = False,
    exchange: bool = True,
    known: Known | None = None,
) -> BodyPlan:
    """Plans a whole step.

    Args:
      program: the traced step.
      inputs: sharding of every argument.
      required: sharding of every output that is given (the state's); None for others.
      axes: the mesh axes.
      small: elements below which unreduced values are reduced as late as possible.
      control: what is asked of the sums that loops accumulate.
      whole: whether small sums behind stationary leaves are all-reduced, rather than
        scattered to be gathered again.
      exchange: whether rows of the batch are exchanged where an op sends less so.
      known: what plans of this program decided that differ in `inputs` and `required`
        alone; this one adds to it. The program must live as long.

    Returns:
      The plan of the step, before any schedule pass.
    """
    fed = _fed(program, axes)
    solver = Solver(axes, small, control, whole, exchange, fed, known or Known())
    preferences = [
        tuple(frozenset({s}) if isinstance(s, Split) else frozenset({None}) for s in r)
        if r is not None
        else (frozenset(),) * len(axes.names)
        for r in required
    ]
    may_stay_unreduced = [frozenset[int]()] * len(required)
    return solver.solve(
        program, inputs, required, preferences, may_stay_unreduced, shared=False
    ).plan


def _fed(program: Program, axes: Axes) -> dict[Names, int]:
    """The gradients that a program feeds residuals to, and along which axis."""
    return {
        program.leaf(node.outputs[0]): axes.names.index(over)
        for node in program.nodes
        if node.kind == "op" and node.eqn.primitive is feed_back_p
        if (over := node.eqn.params["over"]) in axes.names
    }
