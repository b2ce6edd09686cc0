"""What lowerings of moves are: functions by kind of move, and what they share.

In: a kind of move and how it is done, alone or with others of its kind. Out: the two
tables that `collectives` and `joined_collectives` fill and look it up in.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardfn._core import compat
from shardfn._core.moves import AllToAll, Move
from shardfn._core.sharding import (
    Axes,
    AxisSharding,
    Split,
    along,
    local_shape,
    on_axis,
    viewed,
)

Names = tuple[str, ...]
"""What `shard_map` binds for one mesh axis."""

Lowering = Callable[[jax.Array, Sequence[int], Any, Axes], jax.Array]
"""Moves a local block of a value of that global shape."""

LOWERINGS: dict[type[Move], Lowering] = {}


@dataclass(frozen=True, slots=True)
class Block:
    """A local block, the global shape of its value, and its move."""

    x: jax.Array
    shape: Sequence[int]
    move: Any


Joined = Callable[[Sequence[Block], Axes], list[jax.Array]]
"""Moves several blocks by one collective."""

JOINED: dict[type[Move], Joined] = {}


def lowering(kind: type[Move]) -> Callable[[Lowering], Lowering]:
    """Registers how a kind of move is done."""

    def register(run: Lowering) -> Lowering:
        LOWERINGS[kind] = run
        return run

    return register


def joined(kind: type[Move]) -> Callable[[Joined], Joined]:
    """Registers how several moves of a kind are done by one collective."""

    def register(run: Joined) -> Joined:
        JOINED[kind] = run
        return run

    return register


def names_of(move: Move, axes: Axes) -> Names:
    """The names of the mesh axes that a move is over, as `shard_map` binds them."""
    states = (move.state, move.goal)
    group = max((s.group for s in states if isinstance(s, Split)), default=0)
    return tuple(name for axis in move.over for name in axes.bound(axis, group))


def dim_of(state: AxisSharding) -> int:
    assert isinstance(state, Split)
    return state.dim


def to_scatter(
    x: jax.Array, shape: Sequence[int], move: Move, axes: Axes
) -> tuple[jax.Array, int]:
    """`x`, flattened if need be and padded so that the devices of the axis divide it,
    and the dimension that they are to divide."""
    full = local_shape(shape, on_axis(move.before, move.axis, None), axes)
    view, dim = viewed(full, dim_of(move.goal))
    local = local_shape(shape, move.after, axes)[dim]
    parts = along(move.after, move.axis, axes)
    return pad_to(x.reshape(view), dim, local * parts), dim


def to_exchange(
    x: jax.Array, shape: Sequence[int], move: AllToAll, axes: Axes
) -> tuple[jax.Array, int]:
    """`x`, padded so that all parts that it is cut into are alike, and the dimension
    along which it is."""
    dim, n = dim_of(move.goal), move.devices(shape, axes)
    return pad_to(x, dim, -(-move.taken(shape, axes) // n) * n), dim


def pad_to(x: jax.Array, dim: int, size: int) -> jax.Array:
    missing = size - x.shape[dim]
    if not missing:
        return x
    config = [(0, missing if d == dim else 0, 0) for d in range(x.ndim)]
    return lax.pad(x, jnp.zeros((), x.dtype), config)


def pad_parts(x: jax.Array, dim: int, count: int, size: int) -> jax.Array:
    """`x` with each of `count` equal parts of a dimension padded, to `size` in all."""
    if count == 1:
        return pad_to(x, dim, size)
    around = x.shape[:dim], x.shape[dim + 1 :]
    parts = x.reshape(*around[0], count, x.shape[dim] // count, *around[1])
    padded = pad_to(parts, dim + 1, size // count)
    return padded.reshape(*around[0], size, *around[1])


def cut_to(x: jax.Array, dim: int, size: int) -> jax.Array:
    if x.shape[dim] == size:
        return x
    return lax.slice_in_dim(x, 0, size, axis=dim)


def varying(x: jax.Array, *names: str) -> jax.Array:
    """`x` with its type varying over the mesh axes `names` too."""
    missing = tuple(n for n in names if n not in compat.varying_axes(x))
    return compat.cast_varying(x, missing)


def in_one_row(blocks: Sequence[jax.Array]) -> jax.Array:
    """The elements of some blocks, one after the other, as `[1, elements]`."""
    return end_to_end([x.reshape(1, -1) for x in blocks])


def end_to_end(rows: Sequence[jax.Array]) -> jax.Array:
    """`[n, elements]` of each, put together along the second dimension."""
    return jnp.concatenate(compat.varying_alike(rows), axis=1)


def parted(joined: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    """What was put end to end, each of `sizes` elements per row."""
    ends = list(itertools.accumulate(sizes))
    return [
        lax.slice_in_dim(joined, end - size, end, axis=1)
        for size, end in zip(sizes, ends, strict=True)
    ]
