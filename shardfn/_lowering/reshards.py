"""Follows the moves of a plan on one device's blocks, inside `shard_map`.

In: one planned move, or several that are one collective, and local blocks. Out: the
local blocks in the sharding that the moves end in.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardfn._core import compat
from shardfn._core.automatic_axes import auto_names, auto_spec
from shardfn._core.line_names import line_name
from shardfn._core.plan import Place, Reshard
from shardfn._core.sharding import Axes
from shardfn._lowering.joined_collectives import run_together
from shardfn._lowering.quantize import pack, unpack

Run = Callable[[jax.Array], jax.Array]


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

    def as_planned(x: jax.Array) -> jax.Array:
        return _followed([step], [x], range(start, end), place, axes)[0]

    def exact(x: jax.Array) -> jax.Array:
        same = replace(step, written=())
        return _followed([same], [x], range(start, end), place, axes)[0]

    run: Run = as_planned
    moved = _on_wire(step, x)
    if any(move.quantized for move in step.moves[start:end]):
        run = _with_derivative(run, exact)
    elif picked and jnp.issubdtype(moved.dtype, jnp.floating):
        run = _as_bits(run)
    if step.auto:
        spec, names = auto_spec(step.auto), auto_names(step.auto)
        run = jax.shard_map(run, in_specs=spec, out_specs=spec, axis_names=names)
    return _off_wire(run(moved), x)


def _as_bits(run: Run) -> Run:
    """`run` on the bits of floats: a sum with zeros would make -0.0 to 0.0."""

    def moved(x: jax.Array) -> jax.Array:
        bits = lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
        return lax.bitcast_convert_type(run(bits), x.dtype)

    return _with_derivative(moved, run)


def _with_derivative(run: Run, linear: Run) -> Run:
    """`run`, whose derivative is `linear`."""
    moved = jax.custom_jvp(run)

    @moved.defjvp
    def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        return moved(*primals), linear(*tangents)

    return moved


def move_together(
    steps: Sequence[Reshard], blocks: Sequence[jax.Array], place: Place, axes: Axes
) -> list[jax.Array]:
    """Blocks after moves that are one collective."""
    moved = [_on_wire(step, x) for step, x in zip(steps, blocks, strict=True)]
    moved = _followed(steps, moved, range(len(steps[0].path) - 1), place, axes)
    return [_off_wire(y, x) for y, x in zip(moved, blocks, strict=True)]


def _followed(
    steps: Sequence[Reshard],
    blocks: Sequence[jax.Array],
    indices: Iterable[int],
    place: Place,
    axes: Axes,
) -> list[jax.Array]:
    """Blocks after some moves of paths alike, each of them one collective.

    What is quantized is packed in front of the first move that takes it so, and read
    behind the last.
    """
    first, moved = steps[0], list(blocks)
    for packed, group in itertools.groupby(indices, lambda i: first.moves[i].packed_as):
        group = list(group)
        hows = [how for step in steps if (how := step.moves[group[0]].packed_as)]
        given = moved
        if packed:
            moved = [pack(x, how) for x, how in zip(given, hows, strict=True)]
        sizes = [x.shape for x in moved]
        for index in group:
            moves = [step.moves[index] for step in steps]
            shapes = [
                move.sent_shape(step.part_shape) if packed else step.part_shape
                for move, step in zip(moves, steps, strict=True)
            ]
            with jax.named_scope(line_name(place, first.result, index)):
                moved = run_together(moved, shapes, moves, axes)
        if packed:
            moved = [
                unpack(x, how, x.shape[how.dim] // size[how.dim], like.dtype)
                for x, how, size, like in zip(moved, hows, sizes, given, strict=True)
            ]
    return moved


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
