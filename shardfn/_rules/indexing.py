"""Rules of gathers, scatters and dynamic slices.

In: an equation that reads or writes at computed indices. Out: dimensions that are read
or written in full mapped, indexed ones whole, and the dimensions of the index array
mapped (gather, batching dimensions) or reduced (scatter).
"""

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from shardfn._compat import primitives
from shardfn._rule import LocalOp, OpShardingRule, make_rule, register_rule
from shardfn._rules._names import (
    dtype_of,
    fresh_names,
    result_dtype,
    result_shape,
    shape_of,
    take,
)
from shardfn._rules.shape import partly_changed


def _local_sizes(op: LocalOp, sizes: Sequence[int]) -> tuple[int, ...]:
    """Slice sizes on local shapes: dimensions sliced in full stay sliced in full."""
    dims = zip(op.rule.operands[0], shape_of(op.eqn), sizes, strict=True)
    return tuple(
        op.local_size(dim) if size == full else size for dim, full, size in dims
    )


def _gather_local(op: LocalOp, *operands: jax.Array) -> Sequence[jax.Array]:
    sizes = _local_sizes(op, op.eqn.params["slice_sizes"])
    return op.bind(*operands, slice_sizes=sizes)


@register_rule(*primitives("gather"), local=_gather_local)
def _gather(eqn: JaxprEqn) -> OpShardingRule:
    """`a b, c d -> c b  whole={a, d}` for rows of a matrix, `x[indices]`."""
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
    offsets = []
    for d, size in enumerate(shape_of(eqn)):
        if d in numbers.operand_batching_dims:
            continue
        if d in numbers.collapsed_slice_dims:
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
    linear = [[0]] if _fill_is_linear(eqn) else []
    return make_rule(eqn, [operand, indices], [result], whole=whole, linear=linear)


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


@register_rule(*primitives("scatter-add", "scatter-sub"))
def _scatter_add(eqn: JaxprEqn) -> OpShardingRule:
    """`a b, c d, c b -> a b  reduce={c}  whole={a, d}`, as in `x.at[i].add(rows)`."""
    return _scatter(eqn, "sum", [[0, 2]])


@register_rule(*primitives("scatter-max"))
def _scatter_max(eqn: JaxprEqn) -> OpShardingRule:
    """`a b, c d, c b -> a b  reduce={c:max}  whole={a, d}`."""
    return _scatter(eqn, _unless_complex(eqn, "max"))


@register_rule(*primitives("scatter-min"))
def _scatter_min(eqn: JaxprEqn) -> OpShardingRule:
    """`a b, c d, c b -> a b  reduce={c:min}  whole={a, d}`."""
    return _scatter(eqn, _unless_complex(eqn, "min"))


@register_rule(*primitives("scatter-mul"))
def _scatter_mul(eqn: JaxprEqn) -> OpShardingRule:
    """`a b, c d, c b -> a b  whole={a, c, d}`, linear in the operand.

    Products of blocks would each hold the operand once.
    """
    return _scatter(eqn, None, [[0]])


@register_rule(*primitives("scatter"))
def _scatter_overwrite(eqn: JaxprEqn) -> OpShardingRule:
    """`a b, c d, c b -> a b  whole={a, c, d}`.

    Where an index repeats, each device may pick another winner: then not linear.
    """
    return _scatter(eqn, None, [[0, 2]] if eqn.params["unique_indices"] else [])


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
    window_sizes = iter(update_shape[d] for d in numbers.update_window_dims)
    for d, size in enumerate(shape_of(eqn)):
        if d in numbers.operand_batching_dims:
            continue
        if d in numbers.inserted_window_dims:
            whole.add(operand[d])
        elif next(window_sizes) == size:
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


def _dynamic_slice_local(op: LocalOp, *operands: jax.Array) -> Sequence[jax.Array]:
    sizes = _local_sizes(op, op.eqn.params["slice_sizes"])
    return op.bind(*operands, slice_sizes=sizes)


@register_rule(*primitives("dynamic_slice"), local=_dynamic_slice_local)
def _dynamic_slice(eqn: JaxprEqn) -> OpShardingRule:
    """`a b, , -> a c  whole={b, c}` for a slice of dimension 1 at scalar starts."""
    rule = partly_changed(eqn)
    return make_rule(eqn, rule.operands, rule.results, whole=rule.whole, linear=[[0]])


@register_rule(*primitives("dynamic_update_slice"))
def _dynamic_update_slice(eqn: JaxprEqn) -> OpShardingRule:
    """`a b, a c, , -> a b  whole={b, c}` for an update within dimension 1."""
    names = fresh_names()
    operand = take(names, len(shape_of(eqn)))
    sizes = zip(operand, shape_of(eqn), shape_of(eqn, 1), strict=True)
    update = [name if size == part else next(names) for name, size, part in sizes]
    starts = [()] * (len(eqn.invars) - 2)
    return make_rule(
        eqn,
        [operand, update, *starts],
        [operand],
        whole=set(operand) ^ set(update),
        linear=[[0, 1]],
    )
