"""Rules of ops that rearrange elements: broadcast, transpose, concatenate, ...

In: an equation whose result holds elements of its operands, elsewhere. Out: the
dimensions that are carried along mapped; the ones that are cut or joined whole.
"""

from collections.abc import Sequence

import jax
from jax import lax
from jax.extend.core import JaxprEqn

from shardfn._core.compat import primitives
from shardfn._core.make_rule import make_rule
from shardfn._core.op_sharding_rule import OpShardingRule, factor_names
from shardfn._core.rule_registry import LocalOp, register_rule
from shardfn._core.shift import shift_p, shifted_whole
from shardfn.rules._factors import (
    fresh_names,
    result_shape,
    shape_of,
    take,
)


def _broadcast_local(op: LocalOp, operand: jax.Array) -> Sequence[jax.Array]:
    return op.bind(operand, shape=op.result_shapes[0])


@register_rule(*primitives("broadcast_in_dim"), local=_broadcast_local)
def _broadcast_in_dim(eqn: JaxprEqn) -> OpShardingRule:
    """`b -> a b` for `broadcast_dimensions=(1,)`; a widened dimension is new."""
    shape = result_shape(eqn)
    names = fresh_names()
    result = take(names, len(shape))
    places = zip(shape_of(eqn), eqn.params["broadcast_dimensions"], strict=True)
    operand = [result[d] if n == shape[d] else next(names) for n, d in places]
    return make_rule(
        eqn, [operand], [result], linear="each", flat=not operand and bool(shape)
    )


@register_rule(*primitives("transpose"))
def _transpose(eqn: JaxprEqn) -> OpShardingRule:
    """`a b c -> c a b` for `permutation=(2, 0, 1)`."""
    names = factor_names(len(shape_of(eqn)))
    permuted = [names[d] for d in eqn.params["permutation"]]
    return make_rule(eqn, [names], [permuted], linear="each")


def _squeeze_local(op: LocalOp, operand: jax.Array) -> Sequence[jax.Array]:
    return [operand] if op.is_flat else op.bind(operand)


@register_rule(*primitives("squeeze"), local=_squeeze_local)
def _squeeze(eqn: JaxprEqn) -> OpShardingRule:
    """`a b c -> a c` for `dimensions=(1,)`. Flattened blocks do not change."""
    names = factor_names(len(shape_of(eqn)))
    kept = [n for d, n in enumerate(names) if d not in eqn.params["dimensions"]]
    return make_rule(eqn, [names], [kept], linear="each", flat=bool(kept))


@register_rule(*primitives("rev"))
def _rev(eqn: JaxprEqn) -> OpShardingRule:
    """`a b -> a b  whole={b}` for `dimensions=(1,)`."""
    names = factor_names(len(shape_of(eqn)))
    whole = [names[d] for d in eqn.params["dimensions"]]
    return make_rule(eqn, [names], [names], whole=whole, linear="each")


def _shift_local(op: LocalOp, operand: jax.Array) -> Sequence[jax.Array]:
    (factor,) = op.rule.operands[0][op.eqn.params["dimension"]]
    if any(factor == name for name, _, _ in op.parts):
        return [operand]  # the blocks are shifted already
    return [shifted_whole(operand, **op.eqn.params)]


@register_rule(shift_p, local=_shift_local)
def _shift(eqn: JaxprEqn) -> OpShardingRule:
    """`a b -> a b  shift={a: 1}` for one row along dimension 0."""
    names = factor_names(len(shape_of(eqn)))
    rows = {names[eqn.params["dimension"]]: eqn.params["rows"]}
    return make_rule(eqn, [names], [names], linear="each", shifts=rows)


@register_rule(*primitives("concatenate"))
def _concatenate(eqn: JaxprEqn) -> OpShardingRule:
    """`a b, a c -> a d  whole={b, c, d}` for `dimension=1`."""
    dim = eqn.params["dimension"]
    parts, joined, whole = _joined(len(shape_of(eqn)), dim, len(eqn.invars))
    return make_rule(eqn, parts, [joined], whole=whole, linear="all")


def _split_local(op: LocalOp, operand: jax.Array) -> Sequence[jax.Array]:
    axis = op.eqn.params["axis"]
    return op.bind(operand, sizes=tuple(shape[axis] for shape in op.result_shapes))


@register_rule(*primitives("split"), local=_split_local)
def _split(eqn: JaxprEqn) -> OpShardingRule:
    """`a d -> a b, a c  whole={b, c, d}` for `axis=1`."""
    axis = eqn.params["axis"]
    parts, joined, whole = _joined(len(shape_of(eqn)), axis, len(eqn.outvars))
    return make_rule(eqn, [joined], parts, whole=whole, linear="each")


Names = tuple[str, ...]


def _joined(rank: int, dim: int, count: int) -> tuple[list[Names], Names, set[str]]:
    """Names of `count` arrays, of what they make up along `dim`, and of the cuts."""
    names = fresh_names()
    base = take(names, rank)
    cuts = [base[dim], *take(names, count)] if count > 1 else [base[dim]] * 2
    *parts, joined = ((*base[:dim], cut, *base[dim + 1 :]) for cut in cuts)
    return parts, joined, set(cuts) if count > 1 else set()


@register_rule(*primitives("stack"))
def _stack(eqn: JaxprEqn) -> OpShardingRule:
    """`a b, a b -> a c b  whole={c}` for `axis=1`."""
    names = factor_names(len(result_shape(eqn)))
    axis = eqn.params["axis"] % len(names)
    *base, new = names
    result = [*base[:axis], new, *base[axis:]]
    return make_rule(eqn, [base] * len(eqn.invars), [result], whole=[new], linear="all")


@register_rule(*primitives("unstack"))
def _unstack(eqn: JaxprEqn) -> OpShardingRule:
    """`a b c -> a c, a c  whole={b}` for `axis=1`."""
    names = factor_names(len(shape_of(eqn)))
    axis = eqn.params["axis"] % len(names)
    part = (*names[:axis], *names[axis + 1 :])
    return make_rule(
        eqn, [names], [part] * len(eqn.outvars), whole=[names[axis]], linear="each"
    )


def _tile_local(op: LocalOp, operand: jax.Array) -> Sequence[jax.Array]:
    reps = [
        op.size(dim[0]) if len(dim) == 2 else rep
        for rep, dim in zip(op.eqn.params["reps"], op.rule.results[0], strict=True)
    ]
    return op.bind(operand, reps=tuple(reps))


@register_rule(*primitives("tile"), local=_tile_local)
def _tile(eqn: JaxprEqn) -> OpShardingRule:
    """`a b -> a (c b)  whole={b}` for `reps=(1, 3)`; copies can be made anywhere."""
    names = fresh_names()
    operand = take(names, len(shape_of(eqn)))
    reps = eqn.params["reps"]
    copies = {d: next(names) for d, rep in enumerate(reps) if rep != 1}
    sizes = dict(zip(operand, shape_of(eqn), strict=True))
    result = [
        (copies[d], name) if d in copies else (name,) for d, name in enumerate(operand)
    ]
    return make_rule(
        eqn,
        [operand],
        [result],
        sizes=sizes | {name: reps[d] for d, name in copies.items()},
        whole=[operand[d] for d in copies],
        linear="each",
    )


def _iota_local(op: LocalOp) -> Sequence[jax.Array]:
    dimension, dtype = op.eqn.params["dimension"], op.eqn.params["dtype"]
    start = op.start(op.rule.results[0][dimension][0])
    exact = dtype if jax.numpy.issubdtype(dtype, jax.numpy.integer) else "int32"
    index = lax.broadcasted_iota(exact, op.result_shapes[0], dimension)
    return [(index + lax.convert_element_type(start, exact)).astype(dtype)]


@register_rule(*primitives("iota"), local=_iota_local)
def _iota(eqn: JaxprEqn) -> OpShardingRule:
    """` -> a b`: each device counts from where its block starts."""
    return make_rule(eqn, [], [factor_names(len(result_shape(eqn)))])


def _empty_local(op: LocalOp) -> Sequence[jax.Array]:
    return op.bind(shape=op.result_shapes[0])


@register_rule(*primitives("empty"), local=_empty_local)
def _empty(eqn: JaxprEqn) -> OpShardingRule:
    """` -> a b`."""
    return make_rule(eqn, [], [factor_names(len(result_shape(eqn)))])


@register_rule(*primitives("empty2"))
def _empty_scalar(eqn: JaxprEqn) -> OpShardingRule:
    """` -> `: a scalar, which scan broadcasts."""
    return make_rule(eqn, [], [()])
