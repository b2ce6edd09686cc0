"""Rules of gathers and scatters.

In: an equation that reads or writes at computed indices. Out: dimensions that are read
or written in full mapped, indexed ones whole, and the dimensions of the index array
mapped (gather, batching dimensions) or reduced (scatter).
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from shardfn._core.barrier import barrier
from shardfn._core.compat import loses_clamps, primitives
from shardfn._core.index_bounds import clamped, fill_of, in_bounds
from shardfn._core.make_rule import make_rule
from shardfn._core.op_sharding_rule import OpShardingRule
from shardfn._core.rule_registry import LocalOp, register_rule
from shardfn.rules._factors import (
    dtype_of,
    fresh_names,
    result_dtype,
    result_shape,
    shape_of,
    take,
)
from shardfn.rules._selection import selection_rule


def _local_sizes(op: LocalOp, sizes: Sequence[int]) -> tuple[int, ...]:
    """Slice sizes on local shapes: dimensions sliced in full stay sliced in full."""
    dims = zip(op.rule.operands[0], shape_of(op.eqn), sizes, strict=True)
    return tuple(
        op.local_size(dim) if size == full else size for dim, full, size in dims
    )


def _gather_local(op: LocalOp, *operands: jax.Array) -> Sequence[jax.Array]:
    sizes = _local_sizes(op, op.eqn.params["slice_sizes"])
    x, indices = operands
    looked_up = op.eqn.params["dimension_numbers"].start_index_map
    factors = [op.rule.operands[0][d][0] for d in looked_up]
    starts = [op.start(f) if op.rule.reducer(f) else 0 for f in factors]
    if all(isinstance(start, int) for start in starts):
        return op.bind(x, indices, slice_sizes=sizes)
    # Where a device does not hold an element, it gives zero.
    shape, windows = shape_of(op.eqn), op.eqn.params["slice_sizes"]
    fills = "FILL" in op.eqn.params["mode"].name
    columns = [
        in_bounds(indices[..., k], shape[d] - windows[d] + 1)
        if fills
        else clamped(indices[..., k], shape[d] - windows[d])
        for k, d in enumerate(looked_up)
    ]
    local = jnp.stack([c - s for c, s in zip(columns, starts, strict=True)], axis=-1)
    mode = jax.lax.GatherScatterMode.FILL_OR_DROP
    (found,) = op.bind(x, local, slice_sizes=sizes, mode=mode, fill_value=0)
    if fills:
        outside = functools.reduce(jnp.logical_or, (c < 0 for c in columns))
        found = _filled(op, found, outside, starts)
    return [found]


def _filled(
    op: LocalOp, found: jax.Array, outside: jax.Array, starts: Sequence[Any]
) -> jax.Array:
    """What the first device gives in place of what lies outside; the others zero."""
    params = op.eqn.params
    fill, numbers = fill_of(params, found.dtype), params["dimension_numbers"]
    batch = [d for d in range(found.ndim) if d not in numbers.offset_dims]
    outside = jax.lax.broadcast_in_dim(outside, found.shape, batch)
    is_first = functools.reduce(jnp.logical_and, (start == 0 for start in starts))
    fill = jnp.where(is_first, jnp.asarray(fill, found.dtype), jnp.zeros_like(found))
    return jnp.where(outside, fill, found)


@register_rule(*primitives("gather"), local=_gather_local)
def _gather(eqn: JaxprEqn) -> OpShardingRule:
    """`a b, c d -> c b  whole={a, d}` for rows of a matrix, `x[indices]`.

    If they are few, `reduce={a}`: each device gives those that it holds, else zeros.
    """
    numbers = eqn.params["dimension_numbers"]
    slice_sizes = eqn.params["slice_sizes"]
    names = fresh_names()
    operand = take(names, len(shape_of(eqn)))
    indices = _indices(
        shape_of(eqn, 1),
        names,
        dict(
            zip(
                numbers.start_indices_batching_dims,
                [operand[d] for d in numbers.operand_batching_dims],
                strict=True,
            )
        ),
    )
    whole = {indices[-1]}
    offsets, looked_up = [], []
    for d, size in enumerate(shape_of(eqn)):
        if d in numbers.operand_batching_dims:
            continue
        if d in numbers.collapsed_slice_dims and d in numbers.start_index_map:
            looked_up.append(operand[d])
        elif d in numbers.collapsed_slice_dims:
            whole.add(operand[d])
        elif slice_sizes[d] == size:
            offsets.append(operand[d])
        else:
            offsets.append(next(names))
            whole |= {operand[d], offsets[-1]}
    windows, batch = iter(offsets), iter(indices[:-1])
    result = [
        next(windows) if d in numbers.offset_dims else next(batch)
        for d in range(len(result_shape(eqn)))
    ]
    return selection_rule(
        eqn,
        [operand, indices],
        result,
        selected=looked_up,
        whole=whole,
        linear=[[0]] if _fill_is_linear(eqn) else [],
    )


def _indices(
    shape: Sequence[int], names: Iterator[str], batching: dict[int, str]
) -> list[str]:
    """Names of the index array's dimensions; the last one holds the index vectors."""
    return [batching[d] if d in batching else next(names) for d in range(len(shape))]


def _fill_is_linear(eqn: JaxprEqn) -> bool:
    """Whether the sum of what out-of-bounds reads give is what they give in the sum."""
    if "FILL" not in eqn.params["mode"].name:
        return True
    fill = eqn.params["fill_value"]
    if fill is None:
        return jnp.issubdtype(result_dtype(eqn), jnp.inexact)
    return fill == 0 or bool(np.isnan(fill))


def _scatter_local(op: LocalOp, *operands: jax.Array) -> Sequence[jax.Array]:
    """Each device writes what lies in its block, and drops the rest. Of a dimension
    that windows cover in full it writes its part of each, at the same index.

    Indices of fewer than 32 bits are widened: XLA writes a single row at one of uint8
    above 127 as if it were of int8.
    """
    x, indices, updates = operands
    if indices.dtype.itemsize < np.dtype(np.int32).itemsize:
        indices = indices.astype(np.int32)
    numbers = op.eqn.params["dimension_numbers"]
    looked_up = numbers.scatter_dims_to_operand_dims
    covered = {f for dim in op.rule.operands[2] for f in dim}
    factors = [op.rule.operands[0][d][0] for d in looked_up]
    starts = [0 if f in covered else op.start(f) for f in factors]
    if all(isinstance(start, int) for start in starts):
        return op.bind(x, indices, updates)
    clamps = "CLIP" in op.eqn.params["mode"].name
    shape = shape_of(op.eqn)
    windows = _window_sizes(op.eqn)
    columns = []
    for k, (d, start) in enumerate(zip(looked_up, starts, strict=True)):
        column = indices[..., k]
        if clamps:
            column = clamped(column, shape[d] - windows[d])
        else:
            column = in_bounds(column, shape[d] - windows[d] + 1)
        columns.append(column - start)
    if loses_clamps() and indices.size == indices.shape[-1]:
        # What XLA makes of one index reads the row that it names, of all devices' rows
        # where the block was cut out of these, and writes it if it is another device's.
        (x,) = barrier(x)
    mode = jax.lax.GatherScatterMode.FILL_OR_DROP
    return op.bind(x, jnp.stack(columns, axis=-1), updates, mode=mode)


_scatter_rule = functools.partial(register_rule, local=_scatter_local)


@_scatter_rule(*primitives("scatter-add", "scatter-sub"))
def _scatter_add(eqn: JaxprEqn) -> OpShardingRule:
    """`a b, c d, c b -> a b  reduce={c}  whole={d}`, as in `x.at[i].add(rows)`."""
    return _scatter(eqn, "sum", [[0, 2]])


@_scatter_rule(*primitives("scatter-max"))
def _scatter_max(eqn: JaxprEqn) -> OpShardingRule:
    """`a b, c d, c b -> a b  reduce={c:max}  whole={d}`."""
    return _scatter(eqn, _unless_complex(eqn, "max"))


@_scatter_rule(*primitives("scatter-min"))
def _scatter_min(eqn: JaxprEqn) -> OpShardingRule:
    """`a b, c d, c b -> a b  reduce={c:min}  whole={d}`."""
    return _scatter(eqn, _unless_complex(eqn, "min"))


@_scatter_rule(*primitives("scatter-mul"))
def _scatter_mul(eqn: JaxprEqn) -> OpShardingRule:
    """`a b, c d, c b -> a b  whole={c, d}`, linear in the operand.

    Products of blocks would each hold the operand once.
    """
    return _scatter(eqn, None, [[0]])


@_scatter_rule(*primitives("scatter"))
def _scatter_overwrite(eqn: JaxprEqn) -> OpShardingRule:
    """`a b, c d, c b -> a b  whole={c, d}`.

    Where an index repeats, each device may pick another winner: then not linear. Nor
    is `x.at[i].apply(f)`, which is a scatter that computes `f` of the operand.
    """
    linear = eqn.params["unique_indices"] and not _computes(eqn)
    return _scatter(eqn, None, [[0, 2]] if linear else [])


def _computes(eqn: JaxprEqn) -> bool:
    """Whether a scatter writes something else than its updates."""
    update = eqn.params["update_jaxpr"]
    return update is not None and update.outvars[0] is not update.invars[1]


def _unless_complex(eqn: JaxprEqn, reducer: str) -> str | None:
    dtype = dtype_of(eqn)
    return (
        reducer
        if jnp.issubdtype(dtype, jnp.number)
        and not jnp.issubdtype(dtype, jnp.complexfloating)
        else None
    )


def _scatter(
    eqn: JaxprEqn, reducer: str | None, linear: Sequence[Sequence[int]] = ()
) -> OpShardingRule:
    numbers = eqn.params["dimension_numbers"]
    update_shape = shape_of(eqn, 2)
    names = fresh_names()
    operand = take(names, len(shape_of(eqn)))
    batching = dict(
        zip(
            numbers.scatter_indices_batching_dims,
            [operand[d] for d in numbers.operand_batching_dims],
            strict=True,
        )
    )
    indices = _indices(shape_of(eqn, 1), names, batching)
    whole = {indices[-1]}
    windows = []
    window_sizes = _window_sizes(eqn)
    for d, size in enumerate(shape_of(eqn)):
        if d in numbers.operand_batching_dims:
            continue
        if d in numbers.inserted_window_dims:
            if d not in numbers.scatter_dims_to_operand_dims:
                whole.add(operand[d])
        elif window_sizes[d] == size:
            windows.append(operand[d])
        else:
            windows.append(next(names))
            whole |= {operand[d], windows[-1]}
    batch = [f for d, f in enumerate(indices[:-1]) if d not in batching]
    places = iter(indices[:-1]), iter(windows)
    updates = [
        next(places[d in numbers.update_window_dims]) for d in range(len(update_shape))
    ]
    return make_rule(
        eqn,
        [operand, indices, updates],
        [operand],
        reduce=dict.fromkeys(batch, reducer) if reducer else {},
        whole=whole if reducer else whole | set(batch),
        linear=linear,
    )


def _window_sizes(eqn: JaxprEqn) -> list[int]:
    """Size of the window that is written, in each dimension of the operand."""
    numbers = eqn.params["dimension_numbers"]
    sizes = iter(shape_of(eqn, 2)[d] for d in numbers.update_window_dims)
    single = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    return [1 if d in single else next(sizes) for d in range(len(shape_of(eqn)))]
