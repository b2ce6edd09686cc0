"""What moves, calls and loops make, in bytes of a device.

In: steps of a plan. Out: bytes.
"""

from collections.abc import Iterator

from shardfn._core.plan import Apply, BodyPlan, Ref, Reshard
from shardfn._core.program import Node, Program
from shardfn._core.regions import Region
from shardfn._core.sharding import Axes
from shardfn._core.sizes import local_bytes


def moved_bytes(program: Program, step: Reshard, axes: Axes) -> int:
    """What a move makes; nothing if it only waits."""
    if len(step.path) == 1:
        return 0
    size = local_bytes(program.avals[step.result.value], step.path[-1], axes)
    return size // step.itemsize if step.in_bits else size


def exported(node: Node, step: Apply, axes: Axes) -> Iterator[tuple[Ref, int]]:
    """What a call or a loop hands out besides its results, which a loop stacks; what is
    a result, too, takes nothing more."""
    if not step.exports:
        return
    rounds = node.times or 1
    program, body = node.bodies[-1], step.bodies[-1]
    for ref, made in zip(step.exports, body.exports, strict=True):
        size = 0 if made in body.outputs else version_bytes(program, body, made, axes)
        yield ref, size * rounds


def version_bytes(program: Program, body: BodyPlan, ref: Ref, axes: Axes) -> int:
    """What a version that a body makes takes of a device; none if it comes in."""
    for step in body.steps:
        if isinstance(step, Reshard):
            if ref == step.result:
                return moved_bytes(program, step, axes)
            continue
        node = program.nodes[step.node]
        if ref in step.exports:
            return dict(exported(node, step, axes))[ref]
        if not ref.version and ref.value in node.outputs:
            sharding = step.result_shardings[node.outputs.index(ref.value)]
            return local_bytes(program.avals[ref.value], sharding, axes)
    return 0


def results_of(
    node: Node, program: Program, body: BodyPlan, region: Region
) -> dict[Ref, Ref | None]:
    """Which of what a body hands out are results of its node, and for those that a loop
    carries the argument in which an iteration gets them."""
    if node.is_call:
        return {ref: None for ref in body.outputs if ref is not None}
    carried = {j: Ref(program.inputs[i]) for j, i in region.loops}
    outputs = ((body.outputs[j], before) for j, before in carried.items())
    return {ref: before for ref, before in outputs if ref is not None}
