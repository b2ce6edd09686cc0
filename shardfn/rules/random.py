"""Rules of random numbers: with partitionable Threefry a block can be made anywhere.

In: an equation that makes, splits or consumes random keys. Out: dimensions of key
arrays mapped; those of the bits too, if bit i is a pure function of the key and of i.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn
from jax.extend.random import threefry2x32_p

from shardfn._core.compat import primitives, varying_axes
from shardfn._core.make_rule import make_rule
from shardfn._core.op_sharding_rule import OpShardingRule, factor_names
from shardfn._core.rule_registry import LocalOp, register_rule
from shardfn.rules._factors import (
    dtype_of,
    operand_shapes,
    result_shape,
    result_shapes,
    shape_of,
)
from shardfn.rules.elementwise import elementwise_rule


def _is_counted(eqn: JaxprEqn) -> bool:
    """Whether each random number is a hash of its key and of its own flat index."""
    counted = str(dtype_of(eqn)) == "key<fry>"
    return counted and jax.config.jax_threefry_partitionable  # pyright: ignore


def _of_keys(eqn: JaxprEqn, rule: OpShardingRule) -> OpShardingRule:
    """`rule`, or all whole: of an array of RBG keys the first makes all bits."""
    if str(dtype_of(eqn)) == "key<fry>":
        return rule
    return make_rule(eqn, rule.operands, rule.results, whole=dict(rule.sizes))


def _made_from_keys(eqn: JaxprEqn) -> OpShardingRule:
    """`a -> a b c` for an array of keys that each make an array of shape `(b, c)`."""
    keys = len(shape_of(eqn))
    names = factor_names(len(result_shape(eqn)))
    whole = () if _is_counted(eqn) else names[keys:]
    return _of_keys(eqn, make_rule(eqn, [names[:keys]], [names], whole=whole))


def _random_bits_local(op: LocalOp, keys: jax.Array) -> Sequence[jax.Array]:
    if not _splits_made(op):
        return op.bind(keys)
    high, low = _hashed_counts(op, keys)
    width = op.eqn.params["bit_width"]
    dtype = jnp.dtype(f"uint{width}")
    if width < 64:
        return [(high ^ low).astype(dtype)]
    shift = jnp.asarray(32, dtype)
    return [lax.shift_left(high.astype(dtype), shift) | low.astype(dtype)]


@register_rule(*primitives("random_bits"), local=_random_bits_local)
def _random_bits(eqn: JaxprEqn) -> OpShardingRule:
    """`a -> a b c` for `shape=(b, c)`: each device makes exactly its slice."""
    return _made_from_keys(eqn)


def _random_split_local(op: LocalOp, keys: jax.Array) -> Sequence[jax.Array]:
    if not _splits_made(op):
        return op.bind(keys)
    data = jnp.stack(_hashed_counts(op, keys), axis=-1)
    return [jax.random.wrap_key_data(data, impl="threefry2x32")]


@register_rule(*primitives("random_split"), local=_random_split_local)
def _random_split(eqn: JaxprEqn) -> OpShardingRule:
    """`a -> a b` for `shape=(b,)`: each device makes its own keys."""
    return _made_from_keys(eqn)


def _splits_made(op: LocalOp) -> bool:
    """Whether a dimension that the keys do not have is split."""
    made = op.rule.results[0][len(op.rule.operands[0]) :]
    return any((name,) in made for name, _, _ in op.parts)


def _hashed_counts(op: LocalOp, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The two words that Threefry makes for every element of this device's block."""
    made = op.rule.results[0][keys.ndim :]
    counts = _block_counts(
        op.eqn.params["shape"],
        op.result_shapes[0][keys.ndim :],
        [op.start(name) for (name,) in made],
    )
    data = jax.random.key_data(keys)
    rank = len(op.result_shapes[0])
    aligned = keys.shape + (1,) * len(made) if keys.ndim else ()
    words = [data[..., i].reshape(aligned) for i in (0, 1)]
    counts = [lax.expand_dims(c, range(rank - len(made))) for c in counts]
    axes = frozenset().union(*map(varying_axes, (*words, *counts)))
    same = [_vary_over(x, axes) for x in (*words, *counts)]
    high, low = threefry2x32_p.bind(*same)
    return high, low


def _vary_over(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    missing = tuple(axes - varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def _block_counts(
    shape: Sequence[int], block: Sequence[int], starts: Sequence[jax.Array | int]
) -> tuple[jax.Array, jax.Array]:
    """High and low words of the flat indices, in an array of `shape`, of one block.

    Args:
      shape: the global shape.
      block: the block's shape.
      starts: the block's first index along each dimension.

    Returns:
      Two uint32 arrays of the block's shape.
    """
    high = low = jnp.zeros(block, jnp.uint32)
    wide = math.prod(shape) > 2**32
    for dim, (size, start) in enumerate(zip(block, starts, strict=True)):
        stride = math.prod(shape[dim + 1 :])
        index = lax.iota(jnp.uint32, size) + lax.convert_element_type(start, jnp.uint32)
        upper, lower = _times(index, stride)
        upper, lower = (
            lax.broadcast_in_dim(word, block, (dim,)) for word in (upper, lower)
        )
        low = low + lower
        if wide:
            carry = (low < lower).astype(jnp.uint32)
            high = high + upper + carry
    return high, low


def _times(x: jax.Array, factor: int) -> tuple[jax.Array, jax.Array]:
    """High and low words of `x * factor` modulo 2**64, without 64-bit integers."""
    factor_high, factor_low = (
        jnp.uint32(word) for word in divmod(factor % 2**64, 2**32)
    )
    half, mask = jnp.uint32(16), jnp.uint32(0xFFFF)
    x1, x0 = x >> half, x & mask
    f1, f0 = factor_low >> half, factor_low & mask
    low = x0 * f0
    middle = x0 * f1 + (low >> half)
    other = x1 * f0 + (middle & mask)
    high = x1 * f1 + (middle >> half) + (other >> half) + x * factor_high
    return high, (other << half) | (low & mask)


@register_rule(*primitives("random_wrap"))
def _random_wrap(eqn: JaxprEqn) -> OpShardingRule:
    """`a b -> a  whole={b}`: the last dimension is the key's data."""
    names = factor_names(len(shape_of(eqn)))
    keys = len(result_shape(eqn))
    return make_rule(eqn, [names], [names[:keys]], whole=names[keys:])


@register_rule(*primitives("random_unwrap"))
def _random_unwrap(eqn: JaxprEqn) -> OpShardingRule:
    """`a -> a b  whole={b}`: the last dimension is the key's data."""
    names = factor_names(len(result_shape(eqn)))
    keys = len(shape_of(eqn))
    return make_rule(eqn, [names[:keys]], [names], whole=names[keys:])


@register_rule(*primitives("random_fold_in"))
def _random_fold_in(eqn: JaxprEqn) -> OpShardingRule:
    """`a, a -> a` for as many keys as numbers."""
    return _of_keys(eqn, elementwise_rule(eqn))


@register_rule(*primitives("random_gamma"))
def _random_gamma(eqn: JaxprEqn) -> OpShardingRule:
    """`a, a b -> a b  whole={b}`: a key is split over the samples that it makes."""
    names = factor_names(len(result_shape(eqn)))
    keys = len(shape_of(eqn))
    rule = make_rule(eqn, [names[:keys], names], [names], whole=names[keys:])
    return _of_keys(eqn, rule)


@register_rule(*primitives("rng_bit_generator", "rng_uniform"))
def _generator(eqn: JaxprEqn) -> OpShardingRule:
    """`a -> b, c d  whole={a, b, c, d}`: the generator's order is the backend's own."""
    ranks = [len(shape) for shape in (*operand_shapes(eqn), *result_shapes(eqn))]
    names = iter(factor_names(sum(ranks)))
    sides = [[next(names) for _ in range(rank)] for rank in ranks]
    count = len(eqn.invars)
    whole = {name for side in sides for name in side}
    return make_rule(eqn, sides[:count], sides[count:], whole=whole)
