"""Follows the moves of a plan on one device's blocks, inside `shard_map`.

In: one planned move, or several that are one collective, and local blocks. Out: the
local blocks in the sharding that the moves end in.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardfn._core import compat
from shardfn._core.automatic_axes import auto_names, auto_spec
from shardfn._core.plan import Place, Reshard, line_name
from shardfn._core.sharding import Axes
from shardfn._lowering.collectives import run_move
from shardfn._lowering.joined_collectives import run_together


def move_along(
    step: Reshard,
    start: int,
    end: int,
    x: jax.Array,
    place: Place,
    axes: Axes,
    picked: bool = False,
) -> jax.Array:
    """`x` after the moves `start` to `end` of a path, made in the dtype that the step
    names.

    Where automatic axes split the value, one part moves: XLA would gather the parts in
    front of a collective, so those axes are manual here too. Of a sum that is `picked`,
    each element lies on one device, the others having zeros.
    """

    def run(x: jax.Array) -> jax.Array:
        for index in range(start, end):
            before, after = step.path[index : index + 2]
            with jax.named_scope(line_name(place, step.result, index)):
                x = run_move(x, step.part_shape, before, after, axes)
        return x

    moved = _on_wire(step, x)
    if step.auto:
        spec, names = auto_spec(step.auto), auto_names(step.auto)
        over = jax.shard_map(run, in_specs=spec, out_specs=spec, axis_names=names)
    else:
        over = run
    if picked and jnp.issubdtype(moved.dtype, jnp.floating):
        over = _as_bits(over)
    return _off_wire(over(moved), x)


def _as_bits(run: Callable[[jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    """`run` on the bits of floats: a sum with zeros would make -0.0 to 0.0.

    Its derivative is that of `run`.
    """

    @jax.custom_jvp
    def moved(x: jax.Array) -> jax.Array:
        bits = lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
        return lax.bitcast_convert_type(run(bits), x.dtype)

    @moved.defjvp
    def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        return moved(*primals), run(*tangents)

    return moved


def move_together(
    steps: Sequence[Reshard], blocks: Sequence[jax.Array], place: Place, axes: Axes
) -> list[jax.Array]:
    """Blocks after moves that are one collective."""
    first = steps[0]
    moved = [_on_wire(step, x) for step, x in zip(steps, blocks, strict=True)]
    for index in range(len(first.path) - 1):
        ends = [step.path[index : index + 2] for step in steps]
        with jax.named_scope(line_name(place, first.result, index)):
            moved = run_together(moved, [s.shape for s in steps], ends, axes)
    return [_off_wire(y, x) for y, x in zip(moved, blocks, strict=True)]


def _on_wire(step: Reshard, x: jax.Array) -> jax.Array:
    if str(x.dtype) == step.dtype:
        return x
    return lax.convert_element_type(x, step.dtype)


def _off_wire(moved: jax.Array, like: jax.Array) -> jax.Array:
    """What was moved, in the dtype that it had before."""
    if moved.dtype == like.dtype:
        return moved
    weak = getattr(like, "weak_type", False)
    return compat.with_weak_type(lax.convert_element_type(moved, like.dtype), weak)
