"""From a traced step and the shardings of its arguments to a plan. Touches no arrays.

Each round goes forward, deciding every node from its operands, then backward, noting
what consumers prefer of each value and which unreduced values should be reduced where
they are made, until a round changes nothing. Any round's decisions are a correct plan.
"""

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardfn._core.constraint import constrained, operand_preference
from shardfn._core.control import NOTHING_ASKED, Control
from shardfn._core.limits import FREE_ROUNDS
from shardfn._core.op_sharding_rule import OpShardingRule
from shardfn._core.plan import BodyPlan
from shardfn._core.program import Atom, Node, Program, aval_of
from shardfn._core.sharding import Axes, Sharding, Split
from shardfn._core.sizes import elements
from shardfn._propagation import control_flow
from shardfn._propagation.backward import BackwardResult, Memo, propagate_backward
from shardfn._propagation.flow_site import FlowSite, Solved
from shardfn._propagation.insert_reshards import plan_steps
from shardfn._propagation.op_strategy import Decision, OpSite
from shardfn._propagation.preferences import Preferences, reduced
from shardfn._propagation.result_shardings import reduce_at_producer


@dataclass(slots=True)
class Solver:
    """Solves the bodies of one traced step.

    Attributes:
      axes: the mesh axes.
      small: unreduced values with fewer elements are reduced as late as possible: they
        cost latency, not bytes.
      control: which sums of loops to leave unreduced until after them.
    """

    axes: Axes
    small: int
    control: Control
    memo: dict[Any, Solved] = field(default_factory=dict)
    ops: dict[Hashable, Decision] = field(default_factory=dict)
    backward_memo: Memo = field(default_factory=Memo)

    def solve(
        self,
        program: Program,
        inputs: Sequence[Sharding],
        required: Sequence[Sharding | None],
        preferences: Sequence[Preferences],
        may_stay_unreduced: Sequence[bool],
    ) -> Solved:
        """Plans one program.

        Args:
          program: the step, or a body of its control flow.
          inputs: shardings of its arguments.
          required: shardings that its outputs must have; None for any.
          preferences: what the consumers of its outputs would take.
          may_stay_unreduced: whether an output may stay unreduced.

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
        if key not in self.memo:
            self.memo[key] = _Body(
                self,
                program,
                inputs,
                required,
                preferences,
                may_stay_unreduced,
            ).solve()
        return self.memo[key]


@dataclass(slots=True)
class _Body:
    """One program while it is solved."""

    solver: Solver
    program: Program
    inputs: Sequence[Sharding]
    required: Sequence[Sharding | None]
    output_preferences: Sequence[Preferences]
    may_stay_unreduced: Sequence[bool]
    env: dict[int, Sharding] = field(default_factory=dict)
    decisions: list[Decision] = field(default_factory=list)

    def solve(self) -> Solved:
        self.env.update(zip(self.program.inputs, self.inputs, strict=True))
        replicated = self.solver.axes.replicated
        self.env.update((v, replicated) for v, _ in self.program.constants)
        backward = BackwardResult({}, frozenset())
        self.decide_all(backward)
        for round_ in itertools.count(1):
            found = self.propagate_backward()
            preferences = (
                found.preferences if round_ <= FREE_ROUNDS else found.grown(backward)
            )
            found = BackwardResult(
                preferences, found.reduce_at_producer | backward.reduce_at_producer
            )
            changes = found.changes(backward)
            if not changes:
                break
            backward = found
            self.decide_changed(backward, changes)
        plan = plan_steps(
            self.program,
            self.inputs,
            self.decisions,
            self.env,
            [self.output(j, backward) for j in range(len(self.required))],
            self.solver.axes,
        )
        preferences = backward.preferences
        nothing = self.nothing
        return Solved(
            plan, tuple(preferences.get(v, nothing) for v in self.program.inputs)
        )

    def propagate_backward(self) -> BackwardResult:
        """Goes backward over what a forward round decided."""
        return propagate_backward(
            self.program,
            self.decisions,
            self.env,
            self.required,
            self.output_preferences,
            self.may_stay_unreduced,
            self.solver.axes,
            self.solver.backward_memo,
        )

    @property
    def nothing(self) -> Preferences:
        return (frozenset(),) * len(self.solver.axes.names)

    def output(self, j: int, backward: BackwardResult) -> Sharding:
        """The sharding in which output `j` is returned."""
        fixed, atom = self.required[j], self.program.outputs[j]
        if fixed is not None:
            return fixed
        state = self.state(atom)
        if self.may_stay_unreduced[j]:
            return state
        preferences = self.output_preferences[j]
        return reduced(
            state, preferences, aval_of(self.program, atom), self.solver.axes
        )

    def state(self, atom: Atom) -> Sharding:
        return self.env[atom] if isinstance(atom, int) else self.solver.axes.replicated

    def decide_all(self, backward: BackwardResult) -> None:
        """Decides every node in order; also the sharding of every value."""
        for node in self.program.nodes:
            decision = self.decide(node, backward)
            self.decisions.append(decision)
            self.env.update(zip(node.outputs, decision.results, strict=True))

    def decide_changed(self, backward: BackwardResult, changes: set[int]) -> None:
        """Decides again what depends on `changes`, the values of which the backward
        half says something new, or on a value whose sharding changes thereby."""
        moved: set[int] = set()
        for index, node in enumerate(self.program.nodes):
            same = node.kind == "op" and changes.isdisjoint(node.outputs)
            if same and not any(isinstance(a, int) and a in moved for a in node.inputs):
                continue
            decision = self.decide(node, backward)
            self.decisions[index] = decision
            for value, state in zip(node.outputs, decision.results, strict=True):
                if self.env[value] != state:
                    self.env[value] = state
                    moved.add(value)

    def decide(self, node: Node, backward: BackwardResult) -> Decision:
        states = tuple(map(self.state, node.inputs))
        nothing, axes = self.nothing, self.solver.axes
        preferences = tuple(backward.preferences.get(v, nothing) for v in node.outputs)
        now = tuple(self.reduces_at_producer(v, backward) for v in node.outputs)
        if node.kind == "op" and node.rule is not None:
            # Equal layers are decided once: equal equations have one rule object.
            key = id(node.rule), states, preferences, now, node.kinds
            decision = self.solver.ops.get(key)
            if decision is None:
                decision = self.op(node, node.rule, states, preferences)
                decision = reduce_at_producer(
                    node,
                    decision,
                    states,
                    self.result_avals(node),
                    preferences,
                    now,
                    axes,
                )
                self.solver.ops[key] = decision
            return decision
        if node.kind == "op":
            decision = self.fallback(node, states)
        else:
            decision = self.flow(node, states, preferences, backward)
        return reduce_at_producer(
            node, decision, states, self.result_avals(node), preferences, now, axes
        )

    def op(
        self,
        node: Node,
        rule: OpShardingRule,
        states: Sequence[Sharding],
        preferences: Sequence[Preferences],
    ) -> Decision:
        site = OpSite(
            rule=rule,
            operand_avals=self.operand_avals(node),
            result_avals=self.result_avals(node),
            states=states,
            preferences=preferences,
            kinds=node.kinds,
            axes=self.solver.axes,
            small=self.solver.small,
        )
        operands, results, parts = site.decide()
        made = tuple(results)
        notes = tuple(site.notes)
        return Decision(tuple(operands), made, made, tuple(parts), notes=notes)

    def fallback(self, node: Node, states: Sequence[Sharding]) -> Decision:
        """An op without a rule runs on whole operands."""
        replicated = self.solver.axes.replicated
        whole = (replicated,) * len(node.inputs)
        made = (replicated,) * len(node.outputs)
        gathers = not node.eqn.effects and any(s != replicated for s in states)
        return Decision(whole, made, made, fallback=gathers)

    def flow(
        self,
        node: Node,
        states: tuple[Sharding, ...],
        preferences: tuple[Preferences, ...],
        backward: BackwardResult,
    ) -> Decision:
        if node.kind == "barrier":
            return Decision(states, states, states, preferences=preferences)
        if node.kind == "constrain":
            made = constrained(node.eqn, states[0], self.solver.axes)
            back = operand_preference(node.eqn, made, preferences[0])
            return Decision((made,), (made,), (made,), preferences=(back,))
        site = FlowSite(
            node=node,
            operand_avals=self.operand_avals(node),
            result_avals=self.result_avals(node),
            states=states,
            preferences=preferences,
            operand_preferences=[
                backward.preferences.get(a, self.nothing)
                if isinstance(a, int)
                else self.nothing
                for a in node.inputs
            ],
            may_stay_unreduced=[
                self.may_leave_unreduced(node, v, backward) for v in node.outputs
            ],
            axes=self.solver.axes,
            small=self.solver.small,
            solve=self.solver.solve,
            control=self.solver.control,
        )
        return control_flow.decide(site)

    def operand_avals(self, node: Node) -> list[Any]:
        return [aval_of(self.program, a) for a in node.inputs]

    def result_avals(self, node: Node) -> list[Any]:
        return [self.program.avals[v] for v in node.outputs]

    def may_leave_unreduced(
        self, node: Node, value: int, backward: BackwardResult
    ) -> bool:
        """Whether a result of control flow may leave it unreduced.

        What a loop makes in every iteration may if it is small, and is then reduced
        once, after the loop; so may gradients that a loop around this one defers. A
        custom derivative takes cotangents of whole results.
        """
        if node.kind == "custom":
            return False
        if node.kind != "remat" and not self.defers(node, value):
            return elements(self.program.avals[value]) < self.solver.small
        axes = range(len(self.solver.axes.names))
        return all((value, axis) not in backward.reduce_at_producer for axis in axes)

    def defers(self, node: Node, value: int) -> bool:
        """Whether `value` is what a scan stacks of a gradient to be deferred."""
        index = node.outputs.index(value)
        if not any(index in region.stacks for region in node.regions):
            return False
        leaf = self.program.leaf(value)
        return self.solver.control.of(*leaf).accumulate == "defer"

    def reduces_at_producer(
        self, value: int, backward: BackwardResult
    ) -> tuple[bool, ...]:
        """Per mesh axis, whether `value` is to be reduced where it is made."""
        axes = range(len(self.solver.axes.names))
        return tuple((value, axis) in backward.reduce_at_producer for axis in axes)


def propagate(
    program: Program,
    inputs: Sequence[Sharding],
    required: Sequence[Sharding | None],
    axes: Axes,
    small: int,
    control: Control = NOTHING_ASKED,
) -> BodyPlan:
    """Plans a whole step.

    Args:
      program: the traced step.
      inputs: sharding of every argument.
      required: sharding of every output that is given (the state's); None for others.
      axes: the mesh axes.
      small: elements below which unreduced values are reduced as late as possible.
      control: what is asked of the sums that loops accumulate.

    Returns:
      The plan of the step, before any schedule pass.
    """
    solver = Solver(axes, small, control)
    preferences = [
        tuple(frozenset({s}) if isinstance(s, Split) else frozenset({None}) for s in r)
        if r is not None
        else (frozenset(),) * len(axes.names)
        for r in required
    ]
    may_stay_unreduced = [False] * len(required)
    return solver.solve(program, inputs, required, preferences, may_stay_unreduced).plan
