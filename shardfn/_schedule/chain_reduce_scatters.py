"""Sends the gradients of unrolled layers away one after the other.

In: a body's plan. Out: the plan, in which the reduce-scatter of a large gradient waits
for the one before it. XLA combines collectives that do not depend on each other: it
would make one of all of them, at the end of the step, and hold every whole gradient
until then. `order_search` says where that takes memory. XLA for TPUs lets sums wait
that wait for each other, too, so there a layer waits for those of the one before.
"""

import math
from dataclasses import dataclass, field, replace
from typing import TypeGuard

from shardfn._core.limits import CHAINED_BYTES
from shardfn._core.plan import Apply, BodyPlan, Ref, Reshard, Step
from shardfn._core.program import Node, Program
from shardfn._core.reasons import Note, noted
from shardfn._core.sharding import Split
from shardfn._schedule.cotangents import cotangent_of
from shardfn._schedule.versions import fresh, reading, tied
from shardfn._schedule.wire_dtypes import sums_gradient

WAITS = Note(
    "chain_reduce_scatters",
    "waits for the large gradient before it (limits.CHAINED_BYTES: {} or more)",
    (CHAINED_BYTES,),
)


def scatters_alone(step: Step, program: Program) -> TypeGuard[Reshard]:
    """Whether a step scatters a large gradient, by itself."""
    if not _scatters(step, program) or step.together is not None:
        return False
    return math.prod(step.shape) * step.itemsize >= CHAINED_BYTES


def _scatters(step: Step, program: Program) -> TypeGuard[Reshard]:
    if not isinstance(step, Reshard) or not step.during.is_backward:
        return False
    splits = any(isinstance(s, Split) for s in step.path[-1])
    return splits and sums_gradient(program, step)


def can_chain(program: Program, body: BodyPlan) -> bool:
    """Whether remats of a body scatter large gradients, which could wait for each
    other. Where nothing is computed twice to save memory, this would not be worth its
    time: chained, 8 layers of 1024 x 4096 and 512 rows on 8 H100s take 65 MiB in place
    of 90, and 1.66 ms in place of 1.47, as predicted.

    Args:
      program: the program.
      body: its plan.

    Returns:
      Whether they do.
    """
    return any(is_layer(step, program) for step in body.steps)


def is_layer(step: Step, program: Program) -> TypeGuard[Apply]:
    """Whether a step is a remat that scatters large gradients."""
    if not isinstance(step, Apply) or program.nodes[step.node].kind != "remat":
        return False
    (inner,), (body,) = program.nodes[step.node].bodies, step.bodies
    return any(scatters_alone(s, inner) for s in body.steps)


def chain_reduce_scatters(
    program: Program, body: BodyPlan, *, layers_wait: bool = False
) -> BodyPlan:
    """Chains the reduce-scatters of the backward pass in a body, and in its remats.

    Args:
      program: the program.
      body: its plan, scheduled otherwise.
      layers_wait: whether a remat waits for the gradients of the one before it.

    Returns:
      The plan.
    """
    return _Chain(program, body, layers_wait).linked()


@dataclass(slots=True)
class _Chain:
    """State while the reduce-scatters of one body are linked; `last` is the newest, and
    `made` says which operations have made what."""

    program: Program
    body: BodyPlan
    layers_wait: bool = False
    made: dict[Ref, Apply] = field(default_factory=dict)
    last: Ref | None = None
    steps: list[Step] = field(default_factory=list)

    def linked(self) -> BodyPlan:
        for step in self.body.steps:
            if isinstance(step, Apply):
                node = self.program.nodes[step.node]
                step = self.unit(step, node)
                self.made |= dict.fromkeys(map(Ref, node.outputs), step)
            elif _scatters(step, self.program):
                # A small one waits too, or XLA may combine it with an early link.
                if step.after is None and self.last is not None:
                    notes = noted(step, WAITS)
                    step = replace(step, after=self.last, notes=notes)
                if scatters_alone(step, self.program):
                    self.last = step.result
            self.steps.append(step)
        return replace(self.body, steps=tuple(self.steps))

    def unit(self, step: Apply, node: Node) -> Apply:
        """A remat, of which the first scatter waits for the last one before it."""
        if not is_layer(step, self.program):
            return step
        (body,), program = step.bodies, node.bodies[0]
        inner = _Chain(program, body)
        if self.last is not None:
            step = self.waiting(step, node, self.last) if self.layers_wait else step
            inner.last = fresh(body, program.inputs[0])
            inner.body = replace(body, imports=(*body.imports, inner.last))
            step = replace(step, imports=(*step.imports, self.last))
        body = inner.linked()
        assert inner.last is not None
        body = replace(body, exports=(*body.exports, inner.last))
        whole = replace(self.body, steps=(*self.steps, *self.body.steps))
        self.last = fresh(whole, node.outputs[0])
        return replace(step, bodies=(body,), exports=(*step.exports, self.last))

    def waiting(self, layer: Apply, node: Node, last: Ref) -> Apply:
        """A layer that cannot begin before the last gradient is summed."""
        found = cotangent_of(self.program, layer, self.made)
        if found is None:
            return layer
        ref, sharding = found
        whole = replace(self.body, steps=(*self.steps, *self.body.steps))
        new, aval = fresh(whole, ref.value), self.program.avals[ref.value]
        self.steps.append(tied(ref, new, aval, sharding, node.during, last))
        waiting = reading(layer, lambda old: new if old == ref else old)
        assert isinstance(waiting, Apply)
        return waiting
