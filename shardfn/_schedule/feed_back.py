"""Leaves in residuals what quantizing takes from the terms of gradients.

In: a plan whose sums are quantized. Out: the plan, in which the quantized sum behind an
`error_feedback` makes the residual, too; or an error where no terms come there.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NoReturn

from shardfn._core.control import Control
from shardfn._core.errors import ShardingError, called, listed, where
from shardfn._core.leaves import Names
from shardfn._core.moves import ExchangeTerms, Mask
from shardfn._core.plan import Apply, BodyPlan, Ref, Reshard, Step
from shardfn._core.program import Node, Program
from shardfn._core.reasons import Note, noted
from shardfn._core.residual import feed_back_p
from shardfn._core.sharding import Axes
from shardfn._core.sizes import local_bytes
from shardfn._schedule.bodies import inside
from shardfn._schedule.quantize_moves import by_axis
from shardfn._schedule.versions import fresh, reading

FED = (
    "what quantizing takes from each term is added to it in the next step: {} a device"
)


@dataclass(frozen=True, slots=True)
class Feedback:
    """One gradient that a step feeds a residual to.

    Attributes:
      leaf: the names of the parameter's leaves.
      over: the mesh axis over which its terms are summed.
      node: the operation.
      size: bytes of the residual on a device.
      is_used: whether its sum is quantized.
    """

    leaf: Names
    over: str
    node: Node
    size: int
    is_used: bool


def feed_back(
    program: Program, body: BodyPlan, control: Control, axes: Axes
) -> BodyPlan:
    """Lets quantized sums make residuals, in a plan and the plans in it.

    Args:
      program: the step.
      body: its plan, moves quantized.
      control: the dtypes asked for.
      axes: the mesh axes.

    Returns:
      The plan.

    Raises:
      ShardingError: a sum is to be quantized that is made before its residual is added.
    """
    body = inside(program, body, lambda p, b: feed_back(p, b, control, axes))
    renamed: dict[Ref, Ref] = {}
    steps: list[Step] = []
    fed = _fed(program, body)
    for step in body.steps:
        step = reading(step, lambda ref: renamed.get(ref, ref))
        if isinstance(step, Apply) and program.nodes[step.node] in fed.values():
            _check(program, step, body, control, axes)
        elif isinstance(step, Reshard) and (node := fed.get(step.source)):
            if _exchanges(step, node.eqn.params["over"], axes):
                residual = fresh(body, node.outputs[1])
                renamed[Ref(node.outputs[1])] = residual
                size = _size(program, body, node, axes)
                notes = noted(step, Note("feed_back", FED, (size,)))
                step = replace(step, residual=residual, notes=notes)
        steps.append(step)
    outputs = (renamed.get(ref, ref) if ref else None for ref in body.outputs)
    return replace(body, steps=tuple(steps), outputs=tuple(outputs))


def feedbacks(program: Program, body: BodyPlan, axes: Axes) -> Iterator[Feedback]:
    """The gradients of a scheduled plan, and of the plans in it, that have a residual
    over a mesh axis of several devices."""
    fed = _fed(program, body)
    used = {s.source for s in body.steps if isinstance(s, Reshard) and s.residual}
    for ref, node in fed.items():
        over = node.eqn.params["over"]
        if axes.size(over) > 1:
            size = _size(program, body, node, axes)
            yield Feedback(program.leaf(ref.value), over, node, size, ref in used)
    for step in body.steps:
        if isinstance(step, Apply):
            inner = program.nodes[step.node].bodies
            for part, plan in zip(inner, step.bodies, strict=True):
                yield from feedbacks(part, plan, axes)


def _fed(program: Program, body: BodyPlan) -> dict[Ref, Node]:
    """By what they make of gradients, the operations that add residuals."""
    return {
        Ref(node.outputs[0]): node
        for node in program.nodes
        if node.kind == "op" and node.eqn.primitive is feed_back_p
    }


def _exchanges(step: Reshard, over: str, axes: Axes) -> bool:
    """Whether a move begins with the exchange of quantized terms over an axis."""
    first = step.moves[:1]
    return any(
        isinstance(m, ExchangeTerms) and axes.names[m.axis] == over for m in first
    )


def _size(program: Program, body: BodyPlan, node: Node, axes: Axes) -> int:
    """Bytes of a residual on a device."""
    shardings = (
        step.result_shardings[1]
        for step in body.steps
        if isinstance(step, Apply) and program.nodes[step.node] is node
    )
    aval = program.avals[node.outputs[1]]
    return local_bytes(aval, next(shardings), axes)


def _check(
    program: Program, step: Apply, body: BodyPlan, control: Control, axes: Axes
) -> None:
    """Raises if the sum of a gradient is to be quantized, and is made elsewhere."""
    node = program.nodes[step.node]
    leaf, over = program.leaf(node.outputs[0]), node.eqn.params["over"]
    asked = control.of(*leaf)
    if (
        axes.size(over) == 1
        or not by_axis(asked.reduce_dtype, axes)[axes.names.index(over)]
    ):
        return
    axis = axes.names.index(over)
    if axis == axes.stored and asked.accumulate != "defer":
        size = _size(program, body, node, axes)
        _refuse(
            leaf,
            node,
            over,
            f"its terms are whole gradients: {size} bytes on each device",
            "Pass accumulate='defer', which keeps them so anyway, or feed back over an "
            "outer mesh axis, where they are shards.",
        )
    masked = any(
        isinstance(move, Mask) and move.axis == axis
        for made in body.steps
        if isinstance(made, Reshard) and made.result == step.operands[0]
        for move in made.moves
    )
    if masked:
        _refuse(
            leaf,
            node,
            over,
            "it comes there summed",
            "Pass accumulate='defer' if a loop sums it, stationary=False if it belongs "
            "to a leaf that stays where it is, and call error_feedback outside of "
            "lax.cond and before anything else is computed of it.",
        )


def _refuse(leaf: Names, node: Node, over: str, why: str, advice: str) -> NoReturn:
    raise ShardingError(
        f"the gradient of {listed(leaf)} has no terms over mesh axis '{over}' to feed "
        f"a residual to: {why}.\n  at {where(node.eqn)}\n{called()}{advice}"
    )
