"""How one node is decided: by its rule, as control flow, or on whole operands.

In: a node, the shardings of its operands, what the backward half says of its results.
Out: its `Decision`; equal equations share one.
"""

import math
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from shardfn._core.constraint import constrained, operand_preference
from shardfn._core.control import Control
from shardfn._core.leaves import Names
from shardfn._core.op_sharding_rule import OpShardingRule
from shardfn._core.program import Atom, Node, Program, aval_of, number_of
from shardfn._core.sharding import Axes, Sharding
from shardfn._core.sizes import elements
from shardfn._propagation import control_flow
from shardfn._propagation.backward import Said
from shardfn._propagation.decision import Decision
from shardfn._propagation.exchange_rows import exchange_rows
from shardfn._propagation.flow_site import FlowSite, Solve
from shardfn._propagation.op_strategy import OpSite
from shardfn._propagation.preferences import Preferences
from shardfn._propagation.result_shardings import reduce_at_producer


@dataclass(frozen=True, slots=True)
class Decider:
    """Decides the nodes of one program.

    Attributes:
      program: the program.
      env: shardings of its values so far.
      axes: the mesh axes.
      small: unreduced values with fewer elements are reduced as late as possible.
      control: which sums of loops to leave unreduced until after them.
      solve: solves a body.
      known: decisions by what they follow from.
      sources: the least bytes of what each value is made of alone, where leaves are
        stationary.
      free: the values that are made of scalars and constants alone.
      whole: whether small sums behind these are all-reduced.
      exchange: whether rows of the batch are exchanged where an op sends less so.
      fed: by leaf, the mesh axis along which gradients stay terms for a residual.
      shared: of arguments of the program, in how many iterations they are the same.
    """

    program: Program
    env: dict[int, Sharding]
    axes: Axes
    small: int
    control: Control
    solve: Solve
    known: dict[Hashable, Decision]
    sources: Mapping[int, int]
    free: Set[int] = frozenset()
    whole: bool = False
    exchange: bool = True
    fed: Mapping[Names, int] = field(default_factory=dict)
    shared: Mapping[Atom, int] = field(default_factory=dict)

    @property
    def nothing(self) -> Preferences:
        return (frozenset(),) * len(self.axes.names)

    def state(self, atom: Atom) -> Sharding:
        return self.env[atom] if isinstance(atom, int) else self.axes.replicated

    def source(self, atom: Atom) -> int:
        """The least bytes of what a value is made of alone."""
        return self.sources[atom] if isinstance(atom, int) else 0

    def shares(self, node: Node) -> tuple[int, ...]:
        """Per operand, in how many iterations it is the same, as it enters them."""
        return tuple(
            self.shared.get(a, 1) if isinstance(a, int) else 1 for a in node.inputs
        )

    def decide(self, node: Node, said: Said) -> Decision:
        states = tuple(map(self.state, node.inputs))
        nothing = self.nothing
        preferences = tuple(said.preferences.get(v, nothing) for v in node.outputs)
        now = tuple(self.reduces_at_producer(v, said) for v in node.outputs)
        if node.kind == "op" and node.rule is not None:
            # Equal layers are decided once: equal equations have one rule object.
            sources = tuple(map(self.source, node.inputs)) if self.sources else ()
            free = tuple(number_of(a) in self.free for a in node.inputs)
            shared = self.shares(node)
            key = (
                *(id(node.rule), states, preferences, now, node.kinds),
                *(sources, free, shared),
            )
            decision = self.known.get(key)
            if decision is None:
                site = self.site(node, node.rule, states, preferences, free, sources)
                decision = site.decide()
                decision = self.reduced(node, decision, states, preferences, now)
                if self.exchange:
                    decision = exchange_rows(site, decision, shared)
                self.known[key] = decision
            return decision
        if node.kind == "op":
            decision = self.fallback(node, states)
        else:
            decision = self.flow(node, states, preferences, said)
        return self.reduced(node, decision, states, preferences, now)

    def reduced(
        self,
        node: Node,
        decision: Decision,
        states: tuple[Sharding, ...],
        preferences: tuple[Preferences, ...],
        now: Sequence[Sequence[bool]],
    ) -> Decision:
        """The decision, with the sums that are to be reduced where they are made."""
        return reduce_at_producer(
            node,
            decision,
            states,
            self.result_avals(node),
            preferences,
            now,
            self.axes,
            self.whole,
        )

    def site(
        self,
        node: Node,
        rule: OpShardingRule,
        states: Sequence[Sharding],
        preferences: Sequence[Preferences],
        free: Sequence[bool],
        sources: Sequence[int],
    ) -> OpSite:
        return OpSite(
            rule=rule,
            operand_avals=self.operand_avals(node),
            result_avals=self.result_avals(node),
            states=states,
            preferences=preferences,
            kinds=node.kinds,
            axes=self.axes,
            small=self.small,
            free=free,
            sources=sources,
        )

    def fallback(self, node: Node, states: Sequence[Sharding]) -> Decision:
        """An op without a rule runs on whole operands."""
        replicated = self.axes.replicated
        whole = (replicated,) * len(node.inputs)
        made = (replicated,) * len(node.outputs)
        gathers = not node.eqn.effects and any(s != replicated for s in states)
        return Decision(whole, made, made, fallback=gathers)

    def flow(
        self,
        node: Node,
        states: tuple[Sharding, ...],
        preferences: tuple[Preferences, ...],
        said: Said,
    ) -> Decision:
        if node.kind == "barrier":
            return Decision(states, states, states, preferences=preferences)
        if node.kind == "constrain":
            made = constrained(node.eqn, states[0], self.axes)
            back = operand_preference(node.eqn, made, preferences[0])
            return Decision((made,), (made,), (made,), preferences=(back,))
        site = FlowSite(
            node=node,
            operand_avals=self.operand_avals(node),
            result_avals=self.result_avals(node),
            states=states,
            preferences=preferences,
            operand_preferences=[
                said.preferences.get(a, self.nothing)
                if isinstance(a, int)
                else self.nothing
                for a in node.inputs
            ],
            may_stay_unreduced=[
                self.may_leave_unreduced(node, v, said) for v in node.outputs
            ],
            shared=self.shares(node),
            axes=self.axes,
            small=self.small,
            solve=self.solve,
            control=self.control,
            whole=self.whole,
        )
        return control_flow.decide(site)

    def operand_avals(self, node: Node) -> list[Any]:
        return [aval_of(self.program, a) for a in node.inputs]

    def result_avals(self, node: Node) -> list[Any]:
        return [self.program.avals[v] for v in node.outputs]

    def may_leave_unreduced(self, node: Node, value: int, said: Said) -> frozenset[int]:
        """The mesh axes along which a result of control flow may leave it unreduced.

        What a loop makes in every iteration may if it is small, as one or as each of
        what it stacks, and is then reduced once, after the loop; so may gradients that
        a loop around this one defers, and those that a residual is added to behind it,
        along its axis. A custom derivative takes cotangents of whole results.
        """
        if node.kind == "custom":
            return frozenset()
        axes = frozenset(range(len(self.axes.names)))
        if node.kind != "remat" and not self.defers(node, value):
            if self.is_small(node, value):
                return axes
            return axes & {self.fed.get(self.program.leaf(value), -1)}
        now = {axis for axis in axes if (value, axis) in said.reduce_at_producer}
        return (
            axes & {self.fed.get(self.program.leaf(value), -1)} - now if now else axes
        )

    def is_small(self, node: Node, value: int) -> bool:
        """Whether a result is small, or a stack of small ones that takes no more than
        the largest result of one iteration."""
        if elements(self.program.avals[value]) < self.small:
            return True
        stacks = {
            result: self.program.avals[node.outputs[result]]
            for region in node.regions
            for j, result in region.returned()
            if j in region.stacks
        }
        stack = stacks.get(node.outputs.index(value))
        if stack is None:
            return False
        one, *others = (math.prod(x.shape[1:]) for x in (stack, *stacks.values()))
        return one < self.small and elements(stack) <= max(others)

    def defers(self, node: Node, value: int) -> bool:
        """Whether `value` is what a scan stacks of a gradient to be deferred."""
        index = node.outputs.index(value)
        if not any(index in region.stacks for region in node.regions):
            return False
        leaf = self.program.leaf(value)
        return self.control.of(*leaf).accumulate == "defer"

    def reduces_at_producer(self, value: int, said: Said) -> tuple[bool, ...]:
        """Per mesh axis, whether `value` is to be reduced where it is made."""
        axes = range(len(self.axes.names))
        return tuple((value, axis) in said.reduce_at_producer for axis in axes)
