"""The dtype in which a move crosses the wire.

In: moves of a plan and the dtypes asked for. Out: moves that carry them: emit casts in
front of such a move, and back behind it.
"""

from collections.abc import Mapping
from dataclasses import replace

import jax.numpy as jnp

from shardfn._core.control import Control
from shardfn._core.leaves import Names
from shardfn._core.option_values import WireDtype
from shardfn._core.phases import UPDATE
from shardfn._core.plan import BodyPlan, Reshard, Step
from shardfn._core.program import Program
from shardfn._core.quantized import is_quantized
from shardfn._core.reasons import Note, noted
from shardfn._core.sharding import Axes, Split, Unreduced
from shardfn._core.sizes import is_key_name
from shardfn._schedule.stacked_terms import term_dtype
from shardfn._schedule.summed_leaves import summed_leaves

EXTREMES = ("max", "min")


def choose_dtypes(
    program: Program, body: BodyPlan, control: Control, axes: Axes
) -> BodyPlan:
    """Sets the dtypes of the moves of one body.

    Args:
      program: the body's program.
      body: its plan; plans inside it are left alone.
      control: the dtypes asked for.
      axes: the mesh axes.

    Returns:
      The plan. Parameters are gathered in `gather_dtype` if that is narrower than their
      own, gradients summed in `reduce_dtype`, or in the dtype in which a loop that
      stacks their terms has made them, and what is summed over the factor that splits a
      stationary leaf in that leaf's. Maxima of narrow floats are taken in
      float32: their bits are compared (see `_lowering.collectives`), and GPUs and TPUs
      compare no integers of 16 bits. So are sums that the compiler cannot make in their
      own dtype.
    """
    summed = summed_leaves(program, body) if control.asked("reduce_dtype") else {}
    steps = tuple(
        _chosen(program, step, control, axes, summed)
        if isinstance(step, Reshard)
        else step
        for step in body.steps
    )
    return replace(body, steps=steps)


def _chosen(
    program: Program,
    step: Reshard,
    control: Control,
    axes: Axes,
    summed: Mapping[int, Names],
) -> Step:
    asked = control.of(*program.leaf(step.source.value))
    dtype, why = None, ""
    if step.gathers_state and step.phase != UPDATE:
        dtype, why = cast_dtype(asked.gather_dtype), "gather_dtype asks for it"
        if dtype and not is_narrower(dtype, step.dtype):
            dtype = None
    elif sums_gradient(program, step):
        dtype, why = cast_dtype(asked.reduce_dtype), "reduce_dtype asks for it"
        if asked.reduce_dtype is None:
            dtype, why = _narrower_terms(program, step), "its terms are made in it"
    elif sums(step) and (leaves := summed.get(step.source.value)):
        dtype = cast_dtype(control.of(*leaves).reduce_dtype)
        why = "reduce_dtype asks for it"
    elif takes_extreme(step) and step.itemsize < 4:
        dtype, why = "float32", "the bits of maxima and minima are compared"
    if sums(step) and (dtype or step.dtype) in axes.cannot_sum:
        dtype, why = "float32", "the compiler cannot sum its own dtype"
    if dtype is None or not is_floating(step.dtype):
        return step
    notes = noted(step, Note("wire_dtypes", f"moves in {dtype}: {why}"))
    itemsize = jnp.dtype(dtype).itemsize
    return replace(step, dtype=dtype, itemsize=itemsize, notes=notes)


def _narrower_terms(program: Program, step: Reshard) -> str | None:
    """The dtype of 16 bits in which a loop made the terms of a sum that is split, if
    it stacks them in a wider one: in the loop they would be summed in it, too."""
    if not any(isinstance(s, Split) for s in step.path[-1]):
        return None
    made = term_dtype(program, step.source.value)
    if made is None or not is_narrower(made, step.dtype):
        return None
    return made if jnp.dtype(made).itemsize == 2 else None


def cast_dtype(asked: WireDtype) -> str | None:
    """The dtype that values are cast to as a whole; None if they are quantized."""
    return asked if isinstance(asked, str) and not is_quantized(asked) else None


def sums_gradient(program: Program, step: Reshard) -> bool:
    """Whether a move sums the terms of a parameter's gradient."""
    return sums(step) and step.gradient and bool(program.leaf(step.source.value))


def sums(step: Reshard) -> bool:
    """Whether a move sums terms."""
    return any(s == Unreduced() for s in step.path[0])


def takes_extreme(step: Reshard) -> bool:
    """Whether a move takes the maximum or minimum of terms."""
    return any(isinstance(s, Unreduced) and s.op in EXTREMES for s in step.path[0])


def is_floating(dtype: str) -> bool:
    return not is_key_name(dtype) and jnp.issubdtype(jnp.dtype(dtype), jnp.floating)


def is_narrower(dtype: str, other: str) -> bool:
    """Whether `dtype` has fewer bytes than `other`, both floating-point."""
    if not is_floating(dtype) or not is_floating(other):
        return False
    return jnp.dtype(dtype).itemsize < jnp.dtype(other).itemsize
