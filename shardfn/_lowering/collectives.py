"""How one move of a value is done on the wire, inside `shard_map`.

In: a local value, its global shape and two neighbouring shardings. Out: the local value
in the second one. Values are typed as JAX types them under `check_vma=True`: replicated
along an axis means invarying along it. A move that joins has a second lowering behind
its own, or with the first three in `joined_collectives`.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax import lax

from shardfn._core import compat
from shardfn._core.errors import ShardingError, called, step_name
from shardfn._core.moves import (
    AllGather,
    AllReduce,
    AllToAll,
    GatherTerms,
    Mask,
    Move,
    Permute,
    ReduceScatter,
    Regroup,
    Relabel,
    Slice,
)
from shardfn._core.sharding import Axes, along, local_shape, viewed
from shardfn._lowering import quantized_sums as quantized_sums  # has lowerings, too
from shardfn._lowering.move_lowerings import (
    LOWERINGS,
    Names,
    cut_to,
    dim_of,
    lowering,
    names_of,
    to_exchange,
    to_scatter,
    varying,
)


def run_move(x: jax.Array, shape: Sequence[int], move: Move, axes: Axes) -> jax.Array:
    """Makes a move of `x`, a local block of a value of global `shape`."""
    run, sent = LOWERINGS[type(move)], compat.sent_as(x.dtype)
    if sent == x.dtype:
        return run(x, shape, move, axes)
    return run(x.astype(sent), shape, move, axes).astype(x.dtype)


# One move each


@lowering(Relabel)
def _relabel(
    x: jax.Array, shape: Sequence[int], move: Relabel, axes: Axes
) -> jax.Array:
    return x


@lowering(AllGather)
def _all_gather(
    x: jax.Array, shape: Sequence[int], move: AllGather, axes: Axes
) -> jax.Array:
    """Gathers blocks and drops the padding."""
    full, name = local_shape(shape, move.after, axes), names_of(move, axes)
    view, along = viewed(full, dim_of(move.state))
    x = lax.all_gather(varying(x, *name), name, axis=along, tiled=True, to="invarying")
    return cut_to(x, along, view[along]).reshape(full)


@lowering(ReduceScatter)
def _reduce_scatter(
    x: jax.Array, shape: Sequence[int], move: ReduceScatter, axes: Axes
) -> jax.Array:
    name = names_of(move, axes)
    x, dim = to_scatter(x, shape, move, axes)
    x = varying(x, *name)
    return lax.psum_scatter(x, name, scatter_dimension=dim, tiled=True)


@lowering(AllReduce)
def _all_reduce(
    x: jax.Array, shape: Sequence[int], move: AllReduce, axes: Axes
) -> jax.Array:
    name, op = names_of(move, axes), move.reduces
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


@lowering(GatherTerms)
def _gather_terms(
    x: jax.Array, shape: Sequence[int], move: GatherTerms, axes: Axes
) -> jax.Array:
    name = names_of(move, axes)
    terms = lax.all_gather(varying(x, *name), name, to="invarying")
    return terms.prod(axis=0, dtype=x.dtype)


@lowering(AllToAll)
def _all_to_all(
    x: jax.Array, shape: Sequence[int], move: AllToAll, axes: Axes
) -> jax.Array:
    name, dim = names_of(move, axes), dim_of(move.state)
    x, split = to_exchange(x, shape, move, axes)
    x = lax.all_to_all(x, name, split, dim, tiled=True)
    return cut_to(x, dim, local_shape(shape, move.after, axes)[dim])


@lowering(Regroup)
def _regroup(
    x: jax.Array, shape: Sequence[int], move: Regroup, axes: Axes
) -> jax.Array:
    """From a block of a dimension to a block of each of its runs, unit by unit, or
    back. Where a device has a block, `unit` of it is `device * runs + unit` of all."""
    how, name = move.units(axes), names_of(move, axes)
    count, runs, each = how.devices, how.runs, how.exchanged
    me, index = lax.axis_index(name), lax.iota(jnp.int32, runs)
    rows = jnp.moveaxis(x, move.dim, 0)
    units = rows.reshape(runs, -1, *rows.shape[1:])
    came = []
    if each:
        to = lax.broadcasted_iota(jnp.int32, (count, each), 0)
        later = lax.broadcasted_iota(jnp.int32, (count, each), 1)
        if move.back:
            unit = (me - to * runs) % count + later * count
            sent = (to * runs + unit) // count
        else:
            sent = (to - me * runs) % count + later * count
        exchanged = jnp.take(units, sent, axis=0, mode="clip")
        exchanged = lax.all_to_all(exchanged, name, 0, 0, tiled=True)
        came.append(exchanged.reshape(count * each, *units.shape[1:]))
    if move.back:
        source, unit = (me * runs + index) % count, index
        block = jnp.broadcast_to(me, index.shape)
    else:
        block, unit = (index * count + me) // runs, (index * count + me) % runs
        source = block
    found = source * each + unit // count
    for permute in range(how.permutes):
        pairs = how.pairs(permute)
        moved = [how.sent(device, permute) for device in range(count)]
        found = jnp.where(
            jnp.asarray(moved, jnp.int32)[block] == unit, count * each + permute, found
        )
        if move.back:
            places = {b: (a * runs + moved[a]) // count for a, b in pairs}
            moved = [places[device] for device in range(count)]
            pairs = tuple((b, a) for a, b in pairs)
        one = lax.dynamic_slice_in_dim(units, jnp.asarray(moved, jnp.int32)[me], 1)
        moves = any(a != b for a, b in pairs)
        came.append(_sent_on(one, name, pairs) if moves else one)
    units = jnp.take(jnp.concatenate(came), found, axis=0, mode="clip")
    return jnp.moveaxis(units.reshape(rows.shape), 0, move.dim)


def _sent_on(
    x: jax.Array, names: tuple[str, ...], pairs: Sequence[tuple[int, int]]
) -> jax.Array:
    """`lax.ppermute` over several mesh axes, of which these names are major to minor.
    JAX numbers devices in the order of the mesh instead."""
    mesh = jax.sharding.get_abstract_mesh().axis_names
    order = tuple(sorted(names, key=mesh.index)) if {*names} <= {*mesh} else names
    sizes = {name: lax.axis_size(name) for name in names}

    def number(device: int) -> int:
        places = {}
        for name in reversed(names):
            device, places[name] = divmod(device, sizes[name])
        for name in order:
            device = device * sizes[name] + places[name]
        return device

    return lax.ppermute(x, order, [(number(a), number(b)) for a, b in pairs])


@lowering(Permute)
def _permute(
    x: jax.Array, shape: Sequence[int], move: Permute, axes: Axes
) -> jax.Array:
    """Each device's block from `blocks` devices before it, or its own with `rows` rows
    of its neighbour in front, or behind if they are negative, and as many less."""
    dim, blocks, rows = move.shift(shape, axes)
    name = names_of(move, axes)
    count = math.prod(map(lax.axis_size, name))
    step = blocks or (1 if rows > 0 else -1)
    pairs = [(i, (i + step) % count) for i in range(count)]
    if blocks:
        return _sent_on(x, name, pairs)
    size = x.shape[dim]
    cut = size - rows if rows > 0 else -rows
    ends = (
        lax.slice_in_dim(x, 0, cut, axis=dim),
        lax.slice_in_dim(x, cut, size, axis=dim),
    )
    if rows > 0:
        return lax.concatenate([_sent_on(ends[1], name, pairs), ends[0]], dim)
    return lax.concatenate([ends[1], _sent_on(ends[0], name, pairs)], dim)


@lowering(Slice)
def _slice(x: jax.Array, shape: Sequence[int], move: Slice, axes: Axes) -> jax.Array:
    x, dim = to_scatter(x, shape, move, axes)
    local = x.shape[dim] // along(move.after, move.axis, axes)
    start = lax.axis_index(names_of(move, axes)) * local
    return lax.dynamic_slice_in_dim(x, start, local, dim)


@lowering(Mask)
def _mask(x: jax.Array, shape: Sequence[int], move: Mask, axes: Axes) -> jax.Array:
    """`x` on the axis's first device and zero on the others: terms that sum to `x`."""
    name = names_of(move, axes)
    x = varying(x, *name)
    return jnp.where(lax.axis_index(name) == 0, x, jnp.zeros_like(x))


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
