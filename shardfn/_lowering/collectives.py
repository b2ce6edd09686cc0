"""How one move of a value is done on the wire, inside `shard_map`.

In: a local value, its global shape and two neighbouring shardings. Out: the local value
in the second one. Values are typed as JAX types them under `check_vma=True`: replicated
along an axis means invarying along it.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax import lax

from shardfn._core import compat
from shardfn._core.errors import ShardingError, called, step_name
from shardfn._core.resharding import JOINED, devices_of, move_of, shift_of
from shardfn._core.sharding import (
    Axes,
    Sharding,
    Split,
    Unreduced,
    along,
    local_shape,
    on_axis,
    viewed,
)

Names = tuple[str, ...]
"""What `shard_map` binds for one mesh axis."""


def run_move(
    x: jax.Array, shape: Sequence[int], before: Sharding, after: Sharding, axes: Axes
) -> jax.Array:
    """Moves `x`, a local block of a value of global `shape`, from `before` to
    `after`."""
    op, axis = move_of(before, after)
    name = names_of(before, after, axes)
    state, goal = before[axis], after[axis]
    if op == "relabel":
        return x
    if op == "all_reduce":
        assert isinstance(state, Unreduced)
        return _all_reduce(x, name, state.op)
    if op == "gather_terms":
        return lax.all_gather(varying(x, *name), name, to="invarying").prod(
            axis=0, dtype=x.dtype
        )
    if op == "mask":
        return _on_first_device(x, name)
    if op == "ppermute":
        return _shifted(x, name, *shift_of(before, after, shape, axes))
    if op == "all_to_all":
        assert isinstance(state, Split) and isinstance(goal, Split)
        return lax.all_to_all(x, name, goal.dim, state.dim, tiled=True)
    if op == "all_gather":
        assert isinstance(state, Split)
        return _all_gather(x, shape, after, state.dim, name, axes)
    x, dim = _to_scatter(x, shape, before, after, axes)
    local = x.shape[dim] // along(after, axis, axes)
    if op == "psum_scatter":
        x = varying(x, *name)
        return lax.psum_scatter(x, name, scatter_dimension=dim, tiled=True)
    assert op == "slice", op
    return lax.dynamic_slice_in_dim(x, lax.axis_index(name) * local, local, dim)


def run_together(
    blocks: Sequence[jax.Array],
    shapes: Sequence[Sequence[int]],
    ends: Sequence[Sequence[Sharding]],
    axes: Axes,
) -> list[jax.Array]:
    """Moves of the same kind, as one collective if they use the wire.

    Args:
      blocks: local blocks, of one dtype.
      shapes: global shapes of their values.
      ends: the shardings before and after, of each.
      axes: the mesh axes.

    Returns:
      The blocks moved, their elements as `run_move` makes them.
    """
    op, axis = move_of(*ends[0])
    before, after = ends[0]
    name, n = names_of(before, after, axes), devices_of(before, after, shapes[0], axes)
    each = list(zip(blocks, shapes, ends, strict=True))
    if op not in JOINED:
        return [run_move(x, shape, end[0], end[1], axes) for x, shape, end in each]
    if op == "all_gather":
        flat = varying(_joined([x.reshape(1, -1) for x in blocks]), *name)
        parts = lax.all_gather(flat, name, axis=0, tiled=True, to="invarying")
        whole = []
        for part, (x, shape, (before, after)) in zip(
            _parted(parts, [x.size for x in blocks]), each, strict=True
        ):
            full = local_shape(shape, after, axes)
            view, along = viewed(full, _split_on(before, axis))
            part = jnp.moveaxis(part.reshape(n, *x.shape), 0, along)
            size = n * x.shape[along]
            part = part.reshape(*x.shape[:along], size, *x.shape[along + 1 :])
            whole.append(_cut_to(part, along, view[along]).reshape(full))
        return whole
    if op == "all_reduce":
        sums = lax.psum(
            varying(_joined([x.reshape(1, -1) for x in blocks]), *name), name
        )
        parts = _parted(sums, [x.size for x in blocks])
        return [part.reshape(x.shape) for part, x in zip(parts, blocks, strict=True)]
    rows, made = [], []
    for x, shape, (before, after) in each:
        x, dim = _to_scatter(x, shape, before, after, axes)
        local = x.shape[dim] // n
        x = x.reshape(*x.shape[:dim], n, local, *x.shape[dim + 1 :])
        rows.append(jnp.moveaxis(x, dim, 0).reshape(n, -1))
        made.append((*x.shape[:dim], *x.shape[dim + 1 :]))
    terms = varying(_joined(rows), *name)
    sums = lax.psum_scatter(terms, name, scatter_dimension=0, tiled=True)
    parts = _parted(sums, [row.shape[1] for row in rows])
    return [part.reshape(shape) for part, shape in zip(parts, made, strict=True)]


def _joined(rows: Sequence[jax.Array]) -> jax.Array:
    return jnp.concatenate(compat.varying_alike(rows), axis=1)


def _parted(joined: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    ends = list(itertools.accumulate(sizes))
    return [
        lax.slice_in_dim(joined, end - size, end, axis=1)
        for size, end in zip(sizes, ends, strict=True)
    ]


def _to_scatter(
    x: jax.Array,
    shape: Sequence[int],
    before: Sharding,
    after: Sharding,
    axes: Axes,
) -> tuple[jax.Array, int]:
    """`x`, flattened if need be and padded so that the devices of the axis divide it,
    and the dimension that they are to divide."""
    _, axis = move_of(before, after)
    full = local_shape(shape, on_axis(before, axis, None), axes)
    view, dim = viewed(full, _split_on(after, axis))
    local = local_shape(shape, after, axes)[dim]
    return _pad_to(x.reshape(view), dim, local * along(after, axis, axes)), dim


def names_of(before: Sharding, after: Sharding, axes: Axes) -> tuple[str, ...]:
    """The names of the mesh axes that a move is over, as `shard_map` binds them."""
    _, axis = move_of(before, after)
    groups = (s.group for s in (before[axis], after[axis]) if isinstance(s, Split))
    return axes.bound(axis, max(groups, default=0))


def _split_on(sharding: Sharding, axis: int) -> int:
    state = sharding[axis]
    assert isinstance(state, Split)
    return state.dim


def _all_gather(
    x: jax.Array,
    shape: Sequence[int],
    after: Sharding,
    dim: int,
    name: Names,
    axes: Axes,
) -> jax.Array:
    """Gathers blocks and drops the padding."""
    full = local_shape(shape, after, axes)
    view, along = viewed(full, dim)
    x = lax.all_gather(varying(x, *name), name, axis=along, tiled=True, to="invarying")
    return _cut_to(x, along, view[along]).reshape(full)


def _all_reduce(x: jax.Array, name: Names, op: str) -> jax.Array:
    x = varying(x, *name)
    if op == "sum":
        return lax.psum(x, name)
    if op == "max":
        return _extreme(x, name, lax.pmax) if x.dtype != jnp.bool_ else _any(x, name)
    if op == "min":
        return _extreme(x, name, lax.pmin) if x.dtype != jnp.bool_ else ~_any(~x, name)
    if op == "or":
        return _any(x, name)
    if op == "and":
        return ~_any(~x, name)
    raise ValueError(f"unknown reducer {op!r}")


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _extreme(x: jax.Array, name: Names, collective: Any) -> jax.Array:
    """A maximum or minimum over devices, NaN if any device has NaN.

    Collectives of floats lose NaN: on CPUs, and by NCCL. So the bits are compared, as
    integers in the order of the floats, with NaN beyond the infinities.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize < 2:
        return collective(x, name)
    bits = jnp.iinfo(f"int{8 * x.dtype.itemsize}")
    beyond = bits.max if collective is lax.pmax else bits.min

    def mirrored(key: jax.Array) -> jax.Array:
        """Negative floats have the larger bits the smaller they are."""
        return jnp.where(key < 0, key ^ jnp.asarray(bits.max, bits.dtype), key)

    key = mirrored(lax.bitcast_convert_type(x, bits.dtype))
    key = jnp.where(jnp.isnan(x), jnp.asarray(beyond, bits.dtype), key)
    return lax.bitcast_convert_type(mirrored(collective(key, name)), x.dtype)


@_extreme.defjvp
def _no_derivative(name: Names, *_: Any) -> NoReturn:
    raise ShardingError(
        f"{step_name()} is differentiated through a maximum or minimum over mesh axis "
        f"'{name[0]}', which has no derivative: devices do not know who else is tied.\n"
        f"{called()}"
        "Take the gradient inside the step, where it is planned with the step."
    )


def _any(x: jax.Array, name: Names) -> jax.Array:
    return lax.pmax(x.astype(jnp.int8), name).astype(jnp.bool_)


def _shifted(x: jax.Array, name: Names, dim: int, blocks: int, rows: int) -> jax.Array:
    """Each device's block from `blocks` devices before it, or its own with `rows` rows
    of its neighbour in front, or behind if they are negative, and as many less."""
    count = math.prod(map(lax.axis_size, name))
    step = blocks or (1 if rows > 0 else -1)
    pairs = [(i, (i + step) % count) for i in range(count)]
    size = x.shape[dim]
    cut = size - rows if rows > 0 else -rows
    if blocks:
        return lax.ppermute(x, name, pairs)
    ends = (
        lax.slice_in_dim(x, 0, cut, axis=dim),
        lax.slice_in_dim(x, cut, size, axis=dim),
    )
    if rows > 0:
        return lax.concatenate([lax.ppermute(ends[1], name, pairs), ends[0]], dim)
    return lax.concatenate([ends[1], lax.ppermute(ends[0], name, pairs)], dim)


def _on_first_device(x: jax.Array, name: Names) -> jax.Array:
    """`x` on the axis's first device and zero on the others: terms that sum to `x`."""
    x = varying(x, *name)
    return jnp.where(lax.axis_index(name) == 0, x, jnp.zeros_like(x))


def _pad_to(x: jax.Array, dim: int, size: int) -> jax.Array:
    missing = size - x.shape[dim]
    if not missing:
        return x
    config = [(0, missing if d == dim else 0, 0) for d in range(x.ndim)]
    return lax.pad(x, jnp.zeros((), x.dtype), config)


def _cut_to(x: jax.Array, dim: int, size: int) -> jax.Array:
    if x.shape[dim] == size:
        return x
    return lax.slice_in_dim(x, 0, size, axis=dim)


def varying(x: jax.Array, *names: str) -> jax.Array:
    """`x` with its type varying over the mesh axes `names` too."""
    missing = tuple(n for n in names if n not in compat.varying_axes(x))
    return compat.cast_varying(x, missing)
