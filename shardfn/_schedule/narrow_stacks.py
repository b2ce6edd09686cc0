"""Casts behind a loop what its body casts to stack it, where that saves memory.

In: a plan with loops that stack gradients, of layers that compute in bfloat16, in the
float32 of their parameters. Out: the plan in which they stack these before the cast, if
what a step takes of a device is less by `limits.NARROW_STACKS` then.
"""

from collections.abc import Iterator, Set
from dataclasses import replace
from typing import Any

from shardfn._core.leaves import NO_LEAF, Names
from shardfn._core.limits import NARROW_STACKS
from shardfn._core.plan import Apply, BodyPlan, Reshard, Step
from shardfn._core.program import Node, Program, number_of
from shardfn._core.reasons import Note, noted
from shardfn._core.sharding import Axes
from shardfn._core.sizes import bytes_in, local_bytes
from shardfn._schedule.heap import Heap
from shardfn._schedule.peak_bytes import peak_bytes
from shardfn._schedule.stacked_casts import cast_dtype

NARROW = Note(
    "narrow_stacks",
    f"stacked as it is, and cast behind the loop: this saves at least "
    f"{NARROW_STACKS:.0%} of what the step takes of a device (limits.NARROW_STACKS)",
)


def narrow_stacks(program: Program, body: BodyPlan, axes: Axes) -> BodyPlan:
    """Marks what loops are to stack before a cast.

    Args:
      program: the step.
      body: its plan.
      axes: the mesh axes.

    Returns:
      The plan; the same one if too little would be saved.
    """
    # By no compiler's account: a plan is the same for all.
    saved = sum(_saved(program, body, axes))
    if not saved or saved < NARROW_STACKS * peak_bytes(program, body, axes, Heap()):
        return body
    return _marked(program, body)


def _casts(node: Node, step: Apply) -> dict[int, Any]:
    """The results of a loop that it could stack before a cast, and these dtypes."""
    if node.kind != "scan":
        return {}
    found = {j: cast_dtype(node, step, j) for j in node.regions[0].stacks}
    return {j: dtype for j, dtype in found.items() if dtype is not None}


def _saved(program: Program, body: BodyPlan, axes: Axes) -> Iterator[int]:
    """What each stack that could be narrow would save of a device's memory."""
    for step in body.steps:
        if not isinstance(step, Apply):
            continue
        node = program.nodes[step.node]
        for inner in zip(node.bodies, step.bodies, strict=True):
            yield from _saved(*inner, axes)
        for j, dtype in _casts(node, step).items():
            aval = program.avals[node.outputs[j]]
            size = local_bytes(aval, step.result_shardings[j], axes)
            yield size - bytes_in(size, aval, dtype)


def _marked(program: Program, body: BodyPlan) -> BodyPlan:
    steps: list[Step] = []
    for step in body.steps:
        if isinstance(step, Apply) and step.bodies:
            node = program.nodes[step.node]
            inner = zip(node.bodies, step.bodies, strict=True)
            bodies = tuple(_marked(*each) for each in inner)
            if casts := _casts(node, step):
                (made,) = node.bodies
                names = {made.leaf(number_of(made.outputs[j])) for j in casts}
                bodies = (_noted(made, bodies[0], names - {NO_LEAF}),)
            step = replace(step, bodies=bodies, narrow=tuple(casts))
        steps.append(step)
    return replace(body, steps=tuple(steps))


def _noted(program: Program, body: BodyPlan, names: Set[Names]) -> BodyPlan:
    """A body whose sums of these leaves' gradients say that they are stacked as they
    are."""
    steps = (
        replace(step, notes=noted(step, NARROW))
        if isinstance(step, Reshard)
        and any(move.sums for move in step.moves)
        and program.leaf(step.source.value) in names
        else step
        for step in body.steps
    )
    return replace(body, steps=tuple(steps))
