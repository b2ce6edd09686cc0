"""What a compiler casts in front of loops: stacks of which they cast the slices.

In: a program and its plan. Out: for each such stack, from which loop to which its cast
lives, and the bytes. XLA for TPUs casts a stack of weights as a whole, once for all
loops that cast a slice of it in each iteration, as those of a forward and a backward
pass do.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from jax import lax

from shardfn._core.plan import Apply, BodyPlan, HostStep, Ref, Step
from shardfn._core.program import Node, Program
from shardfn._core.sharding import Axes
from shardfn._core.sizes import bytes_in, local_bytes

Cast = tuple[int, int, int]
"""The first and the last step of a plan that needs a cast, and its bytes."""


def cast_stacks(
    program: Program, steps: Sequence[Step | HostStep], axes: Axes
) -> list[Cast]:
    """The stacks that are cast as a whole for the loops of a plan.

    Args:
      program: the program.
      steps: those of its plan, in order.
      axes: the mesh axes.

    Returns:
      Their casts.
    """
    found: dict[tuple[Ref, Any], Cast] = {}
    for i, step in enumerate(steps):
        if isinstance(step, Apply):
            for ref, dtype, size in _casts(program, step, axes):
                first, *_ = found.get((ref, dtype), (i, i, size))
                found[ref, dtype] = first, i, size
    return [*found.values()]


def _casts(program: Program, step: Apply, axes: Axes) -> Iterator[tuple[Ref, Any, int]]:
    """The stacks of which a loop casts the slices, to what, and the bytes of that."""
    node = program.nodes[step.node]
    if node.kind != "scan" or node.is_unrolled:
        return
    (region,), (body,), (plan,) = node.regions, node.bodies, step.bodies
    for i in region.slices:
        ref = step.operands[region.operands[i]]
        dtypes = {*_dtypes(body, plan, body.inputs[i])}
        if ref is None or len(dtypes) != 1:
            continue
        (dtype,) = dtypes
        aval: Any = program.avals[ref.value]
        if dtype is not None and dtype.itemsize < aval.dtype.itemsize:
            sharding = step.operand_shardings[region.operands[i]]
            size = local_bytes(aval, sharding, axes)
            yield ref, dtype, bytes_in(size, aval, dtype)


def _dtypes(body: Program, plan: BodyPlan, value: int) -> Iterator[Any]:
    """To what the readers of a value cast it; None for one that does something else."""
    for step in plan.steps:
        if not isinstance(step, Apply):
            if step.source.value == value:
                yield None
            continue
        node = body.nodes[step.node]
        for i, ref in enumerate(step.operands):
            if ref is not None and ref.value == value:
                yield from _read_as(body, node, step, i)
    if value in body.outputs:
        yield None


def _read_as(body: Program, node: Node, step: Apply, operand: int) -> Iterator[Any]:
    if node.is_call:
        (inner,), (plan,), (region,) = node.bodies, step.bodies, node.regions
        for i, at in enumerate(region.operands):
            if at == operand:
                yield from _dtypes(inner, plan, inner.inputs[i])
    elif node.eqn.primitive is lax.convert_element_type_p:
        yield body.avals[node.outputs[0]].dtype
    elif not node.passes_through:
        yield None
