"""From a traced step and the shardings of its arguments to a plan. Touches no arrays.

Each round goes forward, deciding every node from its operands, then backward, noting
what consumers want of each value and which unreduced values should be reduced where
they are made. A few rounds settle; any round's decisions are a correct plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardfn._control_flow import FlowSite, Solved
from shardfn._decide import Decision, OpSite, elements
from shardfn._phase import FORWARD, node_phases
from shardfn._plan import BodyPlan
from shardfn._program import Atom, Node, Program, aval_of
from shardfn._review import Reviewed, review
from shardfn._rule import OpShardingRule, rule_of
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
    """

    axes: Axes
    small: int
    memo: dict[Any, Solved] = field(default_factory=dict)
    rules: dict[int, OpShardingRule | None] = field(default_factory=dict)

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

    def rule(self, node: Node) -> OpShardingRule | None:
        key = id(node.eqn)
        if key not in self.rules:
            self.rules[key] = rule_of(node.eqn)
        return self.rules[key]


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
            self.solver.rule,
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
        program, axes = self.program, self.solver.axes
        states = [self.state(env, a) for a in node.inputs]
        operand_avals = [aval_of(program, a) for a in node.inputs]
        result_avals = [program.avals[v] for v in node.outputs]
        wants = [reviewed.wants.get(v, self.nothing) for v in node.outputs]
        if node.kind == "barrier":
            made = tuple(states)
            decision = Decision(made, made, made, wants=tuple(wants))
        elif node.kind != "op":
            decision = FlowSite(
                node=node,
                operand_avals=operand_avals,
                result_avals=result_avals,
                states=states,
                wants=wants,
                operand_wants=[
                    reviewed.wants.get(a, self.nothing)
                    if isinstance(a, int)
                    else self.nothing
                    for a in node.inputs
                ],
                keep=[self.may_keep(node, v, reviewed) for v in node.outputs],
                axes=axes,
                small=self.solver.small,
                phase=phase,
                solve=self.solver.solve,
                rule=self.solver.rule,
            ).decide()
            made = decision.made
        elif (rule := self.solver.rule(node)) is None:
            whole = [axes.replicated] * len(node.inputs)
            made = (axes.replicated,) * len(node.outputs)
            gathers = not node.eqn.effects and any(s != axes.replicated for s in states)
            decision = Decision(tuple(whole), made, made, fallback=gathers)
        else:
            site = OpSite(
                rule=rule,
                operand_avals=operand_avals,
                result_avals=result_avals,
                states=states,
                wants=wants,
                zeros=[isinstance(a, int) and a in program.zeros for a in node.inputs],
                axes=axes,
                small=self.solver.small,
            )
            operands, results, parts = site.decide()
            made = tuple(results)
            decision = Decision(tuple(operands), made, made, tuple(parts))
        settled = [
            self.settle(v, state, want, reviewed)
            for v, state, want in zip(node.outputs, made, wants, strict=True)
        ]
        if node.kind == "op":
            settled = split_again(
                self.solver.rule(node),
                decision.operands,
                states,
                settled,
                result_avals,
                wants,
                axes,
            )
        return replace(decision, settled=tuple(settled))

    def may_keep(self, node: Node, value: int, reviewed: Reviewed) -> bool:
        """Whether a result of control flow may leave it unreduced.

        What a loop makes in every iteration may if it is small, and is then reduced
        once, after the loop.
        """
        if node.kind != "remat":
            return elements(self.program.avals[value]) < self.solver.small
        axes = range(len(self.solver.axes.names))
        return all((value, axis) not in reviewed.settled for axis in axes)

    def settle(
        self, value: int, made: Sharding, wants: Wants, reviewed: Reviewed
    ) -> Sharding:
        """Reduces a result where it is made, unless it is to stay unreduced."""
        kept = {
            axis
            for axis, s in enumerate(made)
            if s == Unreduced("sum") and (value, axis) not in reviewed.settled
        }
        if all(not isinstance(s, Unreduced) or a in kept for a, s in enumerate(made)):
            return made
        aval = self.program.avals[value]
        done = reduced(made, wants, aval, self.solver.axes)
        return tuple(
            m if a in kept else d
            for a, (m, d) in enumerate(zip(made, done, strict=True))
        )


def propagate(
    program: Program,
    inputs: Sequence[Sharding],
    required: Sequence[Sharding | None],
    axes: Axes,
    small: int,
) -> BodyPlan:
    """Plans a whole step.

    Args:
      program: the traced step.
      inputs: sharding of every argument.
      required: sharding of every output that is given (the state's); None for others.
      axes: the mesh axes.
      small: elements below which unreduced values are reduced as late as possible.

    Returns:
      The plan of the step, before any schedule pass.
    """
    solver = Solver(axes, small)
    wants = [
        tuple(frozenset({s}) if isinstance(s, Split) else frozenset({None}) for s in r)
        if r is not None
        else (frozenset(),) * len(axes.names)
        for r in required
    ]
    keep = [False] * len(required)
    return solver.solve(program, inputs, required, wants, keep, FORWARD).plan
