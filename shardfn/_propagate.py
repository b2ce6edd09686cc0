"""From a traced step and the shardings of its arguments to a plan. Touches no arrays.

Each round goes forward, deciding every node from its operands, then backward, noting
what consumers want of each value and which unreduced values should be reduced where
they are made. A few rounds settle; any round's decisions are a correct plan.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from shardfn._constrain import constrained, wanted
from shardfn._control import NOTHING_ASKED, Control
from shardfn._control_flow import FlowSite, Solved
from shardfn._decide import Decision, OpSite, elements
from shardfn._phase import FORWARD, node_phases
from shardfn._plan import BodyPlan
from shardfn._program import Atom, Node, Program, aval_of
from shardfn._review import Reviewed, review
from shardfn._rule import OpShardingRule
from shardfn._sharding import Axes, Sharding, Split, Unreduced
from shardfn._split_again import split_again
from shardfn._steps import plan_steps
from shardfn._want import Wants, reduced

ROUNDS = 5


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

    def solve(
        self,
        program: Program,
        inputs: Sequence[Sharding],
        required: Sequence[Sharding | None],
        wants: Sequence[Wants],
        keep: Sequence[bool],
        phase: str,
    ) -> Solved:
        """Plans one program.

        Args:
          program: the step, or a body of its control flow.
          inputs: shardings of its arguments.
          required: shardings that its outputs must have; None for any.
          wants: what the consumers of its outputs would take.
          keep: whether an output may stay unreduced.
          phase: the phase that it starts in.

        Returns:
          The plan, and what the program wants its arguments in.
        """
        key = (
            id(program),
            tuple(inputs),
            tuple(required),
            tuple(wants),
            tuple(keep),
            phase,
        )
        if key not in self.memo:
            self.memo[key] = _Body(
                self, program, inputs, required, wants, keep, phase
            ).solve()
        return self.memo[key]


class _Decided(NamedTuple):
    """What an op was last decided from, and how."""

    states: tuple[Sharding, ...]
    wants: tuple[Wants, ...]
    settled: tuple[tuple[bool, ...], ...]
    decision: Decision


@dataclass(slots=True)
class _Body:
    """One program while it is solved."""

    solver: Solver
    program: Program
    inputs: Sequence[Sharding]
    required: Sequence[Sharding | None]
    out_wants: Sequence[Wants]
    keep: Sequence[bool]
    phase: str
    last: dict[Node, _Decided] = field(default_factory=dict)

    def solve(self) -> Solved:
        reviewed = Reviewed({}, frozenset())
        decisions, env = self.forward(reviewed)
        for _ in range(ROUNDS):
            again = self.review(decisions, env)
            again = Reviewed(again.wants, again.settled | reviewed.settled)
            if again == reviewed:
                break
            reviewed = again
            decisions, env = self.forward(reviewed)
        phases = node_phases(self.program, self.phase)
        plan = plan_steps(
            self.program,
            self.inputs,
            decisions,
            env,
            [self.output(env, j, reviewed) for j in range(len(self.required))],
            phases,
            self.solver.axes,
        )
        nothing = self.nothing
        return Solved(
            plan, tuple(reviewed.wants.get(v, nothing) for v in self.program.inputs)
        )

    def review(
        self, decisions: Sequence[Decision], env: dict[int, Sharding]
    ) -> Reviewed:
        """Goes backward over what a forward round decided."""
        return review(
            self.program,
            decisions,
            env,
            self.required,
            self.out_wants,
            self.keep,
            self.solver.axes,
        )

    @property
    def nothing(self) -> Wants:
        return (frozenset(),) * len(self.solver.axes.names)

    def output(self, env: dict[int, Sharding], j: int, reviewed: Reviewed) -> Sharding:
        """The sharding in which output `j` is returned."""
        fixed, atom = self.required[j], self.program.outputs[j]
        if fixed is not None:
            return fixed
        state = self.state(env, atom)
        if self.keep[j]:
            return state
        wants = self.out_wants[j]
        return reduced(state, wants, aval_of(self.program, atom), self.solver.axes)

    def state(self, env: dict[int, Sharding], atom: Atom) -> Sharding:
        return env[atom] if isinstance(atom, int) else self.solver.axes.replicated

    def forward(self, reviewed: Reviewed) -> tuple[list[Decision], dict[int, Sharding]]:
        """Decides every node in order; also the sharding of every value."""
        program = self.program
        env = dict(zip(program.inputs, self.inputs, strict=True))
        env.update((v, self.solver.axes.replicated) for v, _ in program.constants)
        decisions = []
        phases = node_phases(program, self.phase)
        for node, phase in zip(program.nodes, phases, strict=True):
            decision = self.decide(node, env, reviewed, phase)
            decisions.append(decision)
            env.update(zip(node.outputs, decision.settled, strict=True))
        return decisions, env

    def decide(
        self,
        node: Node,
        env: dict[int, Sharding],
        reviewed: Reviewed,
        phase: str,
    ) -> Decision:
        states = tuple(self.state(env, a) for a in node.inputs)
        wants = tuple(reviewed.wants.get(v, self.nothing) for v in node.outputs)
        settled = tuple(self.settled(v, reviewed) for v in node.outputs)
        if node.kind != "op":
            decision = self.flow(node, states, wants, reviewed, phase)
            return self.settle(node, decision, wants, settled, states)
        if node.rule is None:
            decision = self.fallback(node, states)
            return self.settle(node, decision, wants, settled, states)
        # Equal layers are decided once: one rule object stands for equal equations.
        last = self.last.get(node)
        if last is not None and last[:3] == (states, wants, settled):
            return last.decision
        key = id(node.rule), states, wants, settled, node.kinds
        if key not in self.solver.ops:
            decision = self.op(node, node.rule, states, wants)
            self.solver.ops[key] = self.settle(node, decision, wants, settled, states)
        decision = self.solver.ops[key]
        self.last[node] = _Decided(states, wants, settled, decision)
        return decision

    def op(
        self,
        node: Node,
        rule: OpShardingRule,
        states: Sequence[Sharding],
        wants: Sequence[Wants],
    ) -> Decision:
        site = OpSite(
            rule=rule,
            operand_avals=self.operand_avals(node),
            result_avals=self.result_avals(node),
            states=states,
            wants=wants,
            kinds=node.kinds,
            axes=self.solver.axes,
            small=self.solver.small,
        )
        operands, results, parts = site.decide()
        made = tuple(results)
        return Decision(tuple(operands), made, made, tuple(parts))

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
        wants: tuple[Wants, ...],
        reviewed: Reviewed,
        phase: str,
    ) -> Decision:
        if node.kind == "barrier":
            return Decision(states, states, states, wants=wants)
        if node.kind == "constrain":
            made = constrained(node.eqn, states[0], self.solver.axes)
            back = wanted(node.eqn, made, wants[0])
            return Decision((made,), (made,), (made,), wants=(back,))
        return FlowSite(
            node=node,
            operand_avals=self.operand_avals(node),
            result_avals=self.result_avals(node),
            states=states,
            wants=wants,
            operand_wants=[
                reviewed.wants.get(a, self.nothing)
                if isinstance(a, int)
                else self.nothing
                for a in node.inputs
            ],
            keep=[self.may_keep(node, v, reviewed) for v in node.outputs],
            axes=self.solver.axes,
            small=self.solver.small,
            phase=phase,
            solve=self.solver.solve,
            control=self.solver.control,
        ).decide()

    def operand_avals(self, node: Node) -> list[Any]:
        return [aval_of(self.program, a) for a in node.inputs]

    def result_avals(self, node: Node) -> list[Any]:
        return [self.program.avals[v] for v in node.outputs]

    def may_keep(self, node: Node, value: int, reviewed: Reviewed) -> bool:
        """Whether a result of control flow may leave it unreduced.

        What a loop makes in every iteration may if it is small, and is then reduced
        once, after the loop. A custom derivative takes cotangents of whole results.
        """
        if node.kind == "custom":
            return False
        if node.kind != "remat":
            return elements(self.program.avals[value]) < self.solver.small
        axes = range(len(self.solver.axes.names))
        return all((value, axis) not in reviewed.settled for axis in axes)

    def settled(self, value: int, reviewed: Reviewed) -> tuple[bool, ...]:
        """Per mesh axis, whether `value` is to be reduced where it is made."""
        axes = range(len(self.solver.axes.names))
        return tuple((value, axis) in reviewed.settled for axis in axes)

    def settle(
        self,
        node: Node,
        decision: Decision,
        wants: Sequence[Wants],
        settled: Sequence[Sequence[bool]],
        states: Sequence[Sharding],
    ) -> Decision:
        """Reduces results where they are made, unless they are to stay unreduced."""
        axes, avals = self.solver.axes, self.result_avals(node)
        out = [
            _settle(*result, axes)
            for result in zip(decision.made, avals, wants, settled, strict=True)
        ]
        if node.kind == "op":
            out = split_again(
                node.rule, decision.operands, states, out, avals, wants, axes
            )
        return replace(decision, settled=tuple(out))


def _settle(
    made: Sharding, aval: Any, wants: Wants, settled: Sequence[bool], axes: Axes
) -> Sharding:
    kept = [
        s == Unreduced("sum") and not now for s, now in zip(made, settled, strict=True)
    ]
    if all(k or not isinstance(s, Unreduced) for k, s in zip(kept, made, strict=True)):
        return made
    done = reduced(made, wants, aval, axes)
    return tuple(m if k else d for k, m, d in zip(kept, made, done, strict=True))


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
    wants = [
        tuple(frozenset({s}) if isinstance(s, Split) else frozenset({None}) for s in r)
        if r is not None
        else (frozenset(),) * len(axes.names)
        for r in required
    ]
    keep = [False] * len(required)
    return solver.solve(program, inputs, required, wants, keep, FORWARD).plan
