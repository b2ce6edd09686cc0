"""In which dtype a loop has made what it stacks.

In: a program, and a value that one of its loops stacks. Out: the dtype of the terms, if
the loop's body casts them to a wider one before it hands them out. A sum of such terms
is the same in either, but for rounding, and has fewer bytes in theirs.

In: a loop and its plan. Out: the dtype in which it may stack such terms, where no move
comes between the cast and the stack: cast behind the loop they are the same to the bit,
and the stack has fewer bytes. `narrow_stacks` says where that is done.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardfn._core.plan import Apply, BodyPlan
from shardfn._core.program import Node, Program

CAST = "convert_element_type"


def term_dtype(program: Program, value: int) -> str | None:
    """The dtype of what a loop stacks, before its body casts it.

    Args:
      program: a program.
      value: one of its values.

    Returns:
      The name of the dtype; None if no loop stacks the value, or without a cast.
    """
    node = _maker(program, value)
    if node is None or node.kind != "scan":
        return None
    while node is not None and (node.kind == "scan" or node.is_call):
        (region,), (body,) = node.regions, node.bodies
        at = node.outputs.index(value)
        if node.kind == "scan" and at not in region.stacks:
            return None
        atom = body.outputs[at]
        if not isinstance(atom, int):
            return None
        program, value, node = body, atom, _maker(body, atom)
    if node is None or node.kind != "op" or node.eqn.primitive.name != CAST:
        return None
    (source,) = node.inputs
    return _dtype(program, source) if isinstance(source, int) else None


def narrow_dtypes(node: Node, step: Apply) -> dict[int, Any]:
    """The dtypes before the cast of what a loop stacks so.

    Args:
      node: a node.
      step: its plan.

    Returns:
      The dtypes, by the positions of the results.
    """
    found = {j: cast_dtype(node, step, j) for j in step.narrow}
    return {j: dtype for j, dtype in found.items() if dtype is not None}


def cast_dtype(node: Node, step: Apply, at: int) -> Any | None:
    """The dtype of a result of a scan before a cast to one with all of its numbers,
    which is the last that it goes through; None if there is no such cast, or a move
    behind it."""
    return _cast_from(node.bodies[0], step.bodies[0], at)


def cast_all(
    arrays: Sequence[jax.Array], dtypes: Sequence[Any | None]
) -> list[jax.Array]:
    """The arrays in these dtypes, where one is given."""
    return [
        x if dtype is None else lax.convert_element_type(x, dtype)
        for x, dtype in zip(arrays, dtypes, strict=True)
    ]


def _cast_from(program: Program, plan: BodyPlan, at: int) -> Any | None:
    """The dtype that a result of a body is cast from."""
    ref = plan.outputs[at]
    if ref is None or ref.version:
        return None
    for step in plan.steps:
        if not isinstance(step, Apply):
            continue
        node = program.nodes[step.node]
        if ref.value not in node.outputs:
            continue
        if node.is_call:
            (inner,), (made,) = node.bodies, step.bodies
            return _cast_from(inner, made, node.outputs.index(ref.value))
        is_cast = node.kind == "op" and node.eqn.primitive.name == CAST
        (source,) = node.inputs if is_cast else (None,)
        if not isinstance(source, int):
            return None
        given, wide = (program.avals[v] for v in (source, ref.value))
        return given.dtype if _widens(given.dtype, wide) else None
    return None


def _widens(given: Any, wide: Any) -> bool:
    """Whether a cast to a value's dtype keeps every number of another one."""
    if wide.weak_type or not all(
        jnp.issubdtype(dtype, jnp.floating) for dtype in (given, wide.dtype)
    ):
        return False
    narrow, made = jnp.finfo(given), jnp.finfo(wide.dtype)
    return (
        narrow.bits < made.bits
        and narrow.nmant <= made.nmant
        and narrow.maxexp <= made.maxexp
        and narrow.minexp >= made.minexp
    )


def _dtype(program: Program, value: int) -> str:
    aval: Any = program.avals[value]
    return str(aval.dtype)


def _maker(program: Program, value: int) -> Node | None:
    return next((node for node in program.nodes if value in node.outputs), None)
