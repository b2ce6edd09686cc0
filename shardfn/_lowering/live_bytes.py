"""How much of a program's values each device has at once.

In: a program and its plan. Out: bytes, by which two plans of one program are compared:
what a compiler fuses or updates in place counts in both.
"""

import math
from collections.abc import Iterator

from shardfn._core.plan import Apply, BodyPlan, Ref, Reshard, Step, reads
from shardfn._core.program import Program
from shardfn._core.regions import Region
from shardfn._core.sharding import Axes, local_shape
from shardfn._core.sizes import local_bytes


def live_bytes(
    program: Program,
    body: BodyPlan,
    axes: Axes,
    outside: frozenset[Ref] = frozenset(),
) -> int:
    """The most bytes of what a program makes that are live at once on one device.

    Args:
      program: the program.
      body: its plan.
      axes: the mesh axes.
      outside: versions that are counted already, where what makes them is part of
        another program.

    Returns:
      The bytes; arguments of the program are not among them.
    """
    last: dict[Ref, int] = {}
    for i, step in enumerate(body.steps):
        last.update(dict.fromkeys(reads(step), i))
    last.update(dict.fromkeys(body.leaving, len(body.steps)))
    ends: dict[int, int] = {}
    live = most = 0
    for i, step in enumerate(body.steps):
        for ref, size in _made(program, step, axes):
            if ref in outside:
                continue
            live += size
            end = last.get(ref, i)
            ends[end] = ends.get(end, 0) + size
        most = max(most, live + _inside(program, step, axes))
        live -= ends.pop(i, 0)
    return most


def _made(program: Program, step: Step, axes: Axes) -> Iterator[tuple[Ref, int]]:
    """What a step makes, and its bytes."""
    if isinstance(step, Reshard) and len(step.path) == 1:
        # It may be named after another value than what it lets wait is like.
        local = local_shape(step.shape, step.path[-1], axes)
        yield step.result, math.prod(local) * step.itemsize
        return
    if isinstance(step, Reshard):
        size = local_bytes(program.avals[step.result.value], step.path[-1], axes)
        yield step.result, size // (step.itemsize if step.in_bits else 1)
        return
    outputs = program.nodes[step.node].outputs
    for value, sharding in zip(outputs, step.result_shardings, strict=True):
        yield Ref(value), local_bytes(program.avals[value], sharding, axes)


def _inside(program: Program, step: Step, axes: Axes) -> int:
    """What is live in the bodies of a step."""
    if not isinstance(step, Apply):
        return 0
    node = program.nodes[step.node]
    bodies = zip(node.bodies, step.bodies, node.regions, strict=True)
    return max(
        (live_bytes(p, body, axes, _returned(body, r)) for p, body, r in bodies),
        default=0,
    )


def _returned(body: BodyPlan, region: Region) -> frozenset[Ref]:
    """What of a body are results of its node: what an iteration hands on is written in
    place, and a call hands on what its body makes."""
    refs = (body.outputs[j] for j, _ in region.returned() if j not in region.stacks)
    return frozenset(ref for ref in refs if ref is not None)
