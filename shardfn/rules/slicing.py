"""Rules of ops that cut a window out of a dimension, or put one into it.

In: an equation that slices, pads or updates. Out: dimensions that keep their size
mapped. Of a short slice each device gives what it holds, and zeros elsewhere: the slice
is their sum. A dimension that a window is put into is made where it is used.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from shardfn._core.compat import is_key, primitives
from shardfn._core.index_bounds import clamped
from shardfn._core.make_rule import make_rule
from shardfn._core.op_sharding_rule import OpShardingRule
from shardfn._core.rule_registry import LocalOp, register_rule
from shardfn.rules._factors import (
    fresh_names,
    result_shape,
    shape_of,
    take,
)
from shardfn.rules._selection import selection_rule

Start = jax.Array | int


def partly_changed(
    eqn: JaxprEqn, changed: Sequence[bool] | None = None, linear: Any = ""
) -> OpShardingRule:
    """The rule of an op on one array that needs some of its dimensions whole, as a sort
    along one of them does: `a b -> a c  whole={b, c}`.

    Args:
      eqn: the equation: one array and any number of scalars in, an array of the same
        rank out.
      changed: for each dimension, whether it has to be whole. None: those whose size
        changes.
      linear: in which operands the op is linear, as in `make_rule`.

    Returns:
      The frozen rule.
    """
    before, after = _sides(eqn, changed)
    scalars = [()] * (len(eqn.invars) - 1)
    whole = set(before) ^ set(after)
    return make_rule(eqn, [before, *scalars], [after], whole=whole, linear=linear)


def _sides(
    eqn: JaxprEqn, changed: Sequence[bool] | None = None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of an operand's and of the result's dimensions."""
    shape, result = shape_of(eqn), result_shape(eqn)
    if changed is None:
        changed = [n != m for n, m in zip(shape, result, strict=True)]
    names = fresh_names()
    before = take(names, len(shape))
    after = [
        next(names) if new else name for name, new in zip(before, changed, strict=True)
    ]
    return before, tuple(after)


def window(
    x: jax.Array, dim: int, start: Start, size: int, fill: jax.Array | int = 0
) -> jax.Array:
    """Elements `start` to `start + size` of dimension `dim`, `fill` where it has none.

    Costs memory for `x` and two more such windows. Keys are cut as their words: JAX
    pads none.
    """
    if is_key(x.dtype):
        words = window(jax.random.key_data(x), dim, start, size, fill)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    length = x.shape[dim]
    config = [(size, size, 0) if d == dim else (0, 0, 0) for d in range(x.ndim)]
    wide = lax.pad(x, jnp.asarray(fill, x.dtype), config)
    start = jnp.clip(jnp.asarray(start, jnp.int32) + size, 0, length + size)
    return lax.dynamic_slice_in_dim(wide, start, size, dim)


def _cut(
    op: LocalOp, x: jax.Array, starts: Sequence[Start]
) -> tuple[jax.Array, list[bool]]:
    """`x` with windows cut out of the dimensions that are split, and which are."""
    split = []
    for d, (names, result) in enumerate(
        zip(op.rule.operands[0], op.rule.results[0], strict=True)
    ):
        split.append(names != result and _is_split(op, names[0]))
        if split[-1]:
            here = starts[d] - op.start(names[0])
            x = window(x, d, here, op.rule.size(result[0]))
    return x, split


def _is_split(op: LocalOp, factor: str) -> bool:
    return any(factor == name for name, _, _ in op.parts)


def _changed(op: LocalOp) -> list[bool]:
    dims = zip(op.rule.operands[0], op.rule.results[0], strict=True)
    return [before != after for before, after in dims]


def _slice_rule(eqn: JaxprEqn, changed: Sequence[bool], linear: Any) -> OpShardingRule:
    before, after = _sides(eqn, changed)
    cut = {b: f for b, f in zip(before, after, strict=True) if b != f}
    scalars = [()] * (len(eqn.invars) - 1)
    return selection_rule(
        eqn,
        [before, *scalars],
        after,
        selected=cut,
        whole=cut.values(),
        linear=linear,
    )


def _slice_local(op: LocalOp, operand: jax.Array) -> Sequence[jax.Array]:
    starts = op.eqn.params["start_indices"]
    x, split = _cut(op, operand, starts)
    limits = op.eqn.params["limit_indices"]
    whole = [s or not c for s, c in zip(split, _changed(op), strict=True)]
    return op.bind(
        x,
        start_indices=tuple(0 if k else n for k, n in zip(whole, starts, strict=True)),
        limit_indices=tuple(
            size if k else n for k, n, size in zip(whole, limits, x.shape, strict=True)
        ),
    )


@register_rule(*primitives("slice"), local=_slice_local)
def _slice(eqn: JaxprEqn) -> OpShardingRule:
    """`a b -> a c  reduce={b}  whole={c}` for a short slice of dimension 1; `b` is
    whole too if the slice is long or has strides."""
    strides = eqn.params["strides"]
    if strides is not None and any(stride != 1 for stride in strides):
        return partly_changed(eqn, linear="each")
    changed = [n != m for n, m in zip(shape_of(eqn), result_shape(eqn), strict=True)]
    return _slice_rule(eqn, changed, "each")


def _clamped(op: LocalOp, starts: Sequence[jax.Array], sizes: Sequence[int]) -> list:
    """Starts as JAX moves them, so that the window lies inside.

    They are passed on so: of a slice that devices then split, XLA makes one slice, and
    loses where the first was moved to (https://github.com/openxla/xla/issues/49121).
    """
    limits = (n - m for n, m in zip(shape_of(op.eqn), sizes, strict=True))
    return [clamped(*pair) for pair in zip(starts, limits, strict=True)]


def _dynamic_slice_local(
    op: LocalOp, operand: jax.Array, *starts: jax.Array
) -> Sequence[jax.Array]:
    sizes = op.eqn.params["slice_sizes"]
    places = _clamped(op, starts, sizes)
    x, split = _cut(op, operand, places)
    local = tuple(
        m if c and not s else n
        for n, m, c, s in zip(x.shape, sizes, _changed(op), split, strict=True)
    )
    places = [
        jnp.zeros_like(place) if s else place
        for place, s in zip(places, split, strict=True)
    ]
    return op.bind(x, *places, slice_sizes=local)


@register_rule(*primitives("dynamic_slice"), local=_dynamic_slice_local)
def _dynamic_slice(eqn: JaxprEqn) -> OpShardingRule:
    """`a b, , -> a c  reduce={b}  whole={c}` for a short slice of dimension 1 at scalar
    starts; `b` is whole too if the slice is long."""
    changed = [n != m for n, m in zip(shape_of(eqn), result_shape(eqn), strict=True)]
    return _slice_rule(eqn, changed, [[0]])


def _dynamic_update_slice_local(
    op: LocalOp, operand: jax.Array, update: jax.Array, *starts: jax.Array
) -> Sequence[jax.Array]:
    places = _clamped(op, starts, shape_of(op.eqn, 1))
    inside = None
    for d, (names, part) in enumerate(
        zip(op.rule.operands[0], op.rule.operands[1], strict=True)
    ):
        if names == part or not _is_split(op, names[0]):
            continue
        size, here = operand.shape[d], op.start(names[0]) - places[d]
        index = lax.broadcasted_iota(jnp.int32, operand.shape, d) + here
        within = (index >= 0) & (index < update.shape[d])
        inside = within if inside is None else inside & within
        update = window(update, d, here, size)
        places[d] = jnp.zeros_like(places[d])
    (updated,) = op.bind(operand, update, *places)
    return [updated if inside is None else jnp.where(inside, updated, operand)]


@register_rule(*primitives("dynamic_update_slice"), local=_dynamic_update_slice_local)
def _dynamic_update_slice(eqn: JaxprEqn) -> OpShardingRule:
    """`a b, a c, , -> a b  whole={c}` for an update within dimension 1."""
    names = fresh_names()
    operand = take(names, len(shape_of(eqn)))
    sizes = zip(operand, shape_of(eqn), shape_of(eqn, 1), strict=True)
    update = [name if size == part else next(names) for name, size, part in sizes]
    starts = [()] * (len(eqn.invars) - 2)
    return make_rule(
        eqn,
        [operand, update, *starts],
        [operand],
        whole=set(update) - set(operand),
        linear=[[0, 1]],
    )


def _pad_local(op: LocalOp, x: jax.Array, fill: jax.Array) -> Sequence[jax.Array]:
    config = list(op.eqn.params["padding_config"])
    for d, (names, result) in enumerate(
        zip(op.rule.operands[0], op.rule.results[0], strict=True)
    ):
        if names != result and _is_split(op, result[0]):
            here = op.start(result[0]) - config[d][0]
            x = window(x, d, here, op.result_shapes[0][d], fill)
            config[d] = (0, 0, 0)
    return op.bind(x, fill, padding_config=tuple(config))


@register_rule(*primitives("pad"), local=_pad_local)
def _pad(eqn: JaxprEqn) -> OpShardingRule:
    """`a b, -> a c  whole={b}` for a padded dimension 1; `c` is whole too if it has
    padding between its elements."""
    configs = eqn.params["padding_config"]
    before, after = _sides(eqn, [any(config) for config in configs])
    dims = zip(before, after, configs, strict=True)
    between = {f for _, f, (_, _, interior) in dims if interior}
    whole = (set(before) - set(after)) | (between - set(before))
    return make_rule(eqn, [before, ()], [after], whole=whole, linear="all")
