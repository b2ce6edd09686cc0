"""Rules of reductions, cumulative reductions and windowed reductions.

In: an equation that combines the elements of some dimensions. Out: those dimensions
reduced where the partial results of blocks can be combined, whole where not.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from shardfn._core.compat import primitives
from shardfn._core.make_rule import make_rule
from shardfn._core.op_sharding_rule import OpShardingRule, factor_names
from shardfn._core.rule_registry import LocalOp, register_rule
from shardfn.rules._factors import dtype_of, fresh_names, result_shape, shape_of, take

_REDUCERS = {
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_prod": "prod",
    "reduce_and": "and",
    "reduce_or": "or",
}


def _reduce_local(op: LocalOp, operand: jax.Array) -> Sequence[jax.Array]:
    return op.bind(operand, **({"axes": op.flat_axes} if op.is_flat else {}))


@register_rule(*primitives(*_REDUCERS, "reduce_xor"), local=_reduce_local)
def _reduce(eqn: JaxprEqn) -> OpShardingRule:
    """`a b -> a  reduce={b}` for `axes=(1,)`."""
    reducer = _reducer(eqn)
    names = factor_names(len(shape_of(eqn)))
    reduced = [names[axis] for axis in eqn.params["axes"]]
    return make_rule(
        eqn,
        [names],
        [[name for name in names if name not in reduced]],
        reduce=dict.fromkeys(reduced, reducer) if reducer else {},
        whole=() if reducer else reduced,
        linear="each" if reducer == "sum" else "",
        flat=bool(reducer) and len(reduced) == len(names) > 0,
    )


def _reducer(eqn: JaxprEqn) -> str | None:
    """How the results of blocks combine; None where no collective can combine them."""
    reducer = _REDUCERS.get(eqn.primitive.name)
    dtype = dtype_of(eqn)
    if reducer in ("and", "or") and dtype != jnp.bool_:
        return None
    if reducer in ("max", "min") and jnp.issubdtype(dtype, jnp.complexfloating):
        return None
    return reducer


@register_rule(*primitives("argmax", "argmin"))
def _argmax(eqn: JaxprEqn) -> OpShardingRule:
    """`a b -> a  whole={b}` for `axes=(1,)`."""
    names = factor_names(len(shape_of(eqn)))
    whole = [names[axis] for axis in eqn.params["axes"]]
    return make_rule(
        eqn, [names], [[name for name in names if name not in whole]], whole=whole
    )


@register_rule(*primitives("reduce"))
def _generic_reduce(eqn: JaxprEqn) -> OpShardingRule:
    """`a b, -> a  whole={b}` for `dimensions=(1,)`: operands, then initial values."""
    names = factor_names(len(shape_of(eqn)))
    whole = [names[axis] for axis in eqn.params["dimensions"]]
    count = len(eqn.outvars)
    return make_rule(
        eqn,
        [names] * count + [()] * count,
        [[name for name in names if name not in whole]] * count,
        whole=whole,
    )


@register_rule(*primitives("cumsum", "cumlogsumexp", "cummax", "cummin", "cumprod"))
def _cumulative(eqn: JaxprEqn) -> OpShardingRule:
    """`a b -> a b  whole={b}` for `axis=1`; only sums are linear."""
    linear = "each" if eqn.primitive.name == "cumsum" else ""
    names = factor_names(len(shape_of(eqn)))
    return make_rule(
        eqn, [names], [names], whole=[names[eqn.params["axis"]]], linear=linear
    )


@register_rule(*primitives("reduce_window_sum"))
def _reduce_window_sum(eqn: JaxprEqn) -> OpShardingRule:
    """`a b -> a c  whole={b, c}` for a window over dimension 1."""
    return _windowed(eqn, 1, [[0]])


@register_rule(*primitives("reduce_window_max", "reduce_window_min"))
def _reduce_window(eqn: JaxprEqn) -> OpShardingRule:
    """`a b -> a c  whole={b, c}` for a window over dimension 1."""
    return _windowed(eqn, 1)


@register_rule(*primitives("reduce_window"))
def _generic_reduce_window(eqn: JaxprEqn) -> OpShardingRule:
    """`a b, -> a c  whole={b, c}`: operands, then initial values."""
    return _windowed(eqn, len(eqn.outvars))


@register_rule(*primitives("select_and_gather_add"))
def _select_and_gather_add(eqn: JaxprEqn) -> OpShardingRule:
    """`a b, a b -> a c  whole={b, c}`, linear in the gathered values."""
    return _windowed(eqn, 2, [[0]])


def _windowed(
    eqn: JaxprEqn, arrays: int, linear: Sequence[Sequence[int]] = ()
) -> OpShardingRule:
    """The rule of windows sliding over `arrays` leading operands of one shape."""
    names = fresh_names()
    operand = take(names, len(shape_of(eqn)))
    result = [
        name if _is_trivial_window(eqn, d) else next(names)
        for d, name in enumerate(operand)
    ]
    return make_rule(
        eqn,
        [operand] * arrays + [()] * (len(eqn.invars) - arrays),
        [result] * len(eqn.outvars),
        whole=set(operand) ^ set(result),
        linear=linear,
    )


def _is_trivial_window(eqn: JaxprEqn, dim: int) -> bool:
    """Whether windows along `dim` hold one element each, in order."""
    params = eqn.params
    base = params.get("base_dilation")
    return (
        params["window_dimensions"][dim] == 1
        and params["window_strides"][dim] == 1
        and tuple(params["padding"][dim]) == (0, 0)
        and (base is None or base[dim] == 1)
    )


@register_rule(*primitives("select_and_scatter_add"))
def _select_and_scatter_add(eqn: JaxprEqn) -> OpShardingRule:
    """`a c, a b -> a b  whole={b, c}`: source, operand; linear in the source."""
    return _window_scatter(eqn, source=0, operand=1, linear=[[0]])


@register_rule(*primitives("select_and_scatter"))
def _select_and_scatter(eqn: JaxprEqn) -> OpShardingRule:
    """`a b, a c, -> a b  whole={b, c}`: operand, source, initial value."""
    return _window_scatter(eqn, source=1, operand=0)


def _window_scatter(
    eqn: JaxprEqn,
    source: int,
    operand: int,
    linear: Sequence[Sequence[int]] = (),
) -> OpShardingRule:
    names = fresh_names()
    result = take(names, len(result_shape(eqn)))
    windows = [
        name if _is_trivial_window(eqn, d) else next(names)
        for d, name in enumerate(result)
    ]
    operands: list[Sequence[str]] = [()] * len(eqn.invars)
    operands[source], operands[operand] = windows, result
    moved = {r for r, w in zip(result, windows, strict=True) if r != w}
    whole = moved | (set(windows) - set(result))
    return make_rule(eqn, operands, [result], whole=whole, linear=linear)
