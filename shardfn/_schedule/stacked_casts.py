"""Which dtype what a loop stacks has before its body casts it last.

In: a loop and its plan. Out: the dtype in which it may stack a result, where no move
comes between the cast and the stack: cast behind the loop it is the same, but for a
rounding in front of the cast that XLA might leave out, and the stack has fewer bytes.
`narrow_stacks` says where that is done.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardfn._core.plan import Apply, BodyPlan
from shardfn._core.program import Node, Program
from shardfn._core.sizes import keeps_numbers
from shardfn._schedule.stacked_terms import CAST


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
    """Whether a cast to a value's dtype takes more bits and keeps every number."""
    more = jnp.dtype(given).itemsize < wide.dtype.itemsize and not wide.weak_type
    return more and keeps_numbers(given, wide.dtype)
