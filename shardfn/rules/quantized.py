"""The rules of what knows of eight bits: stored leaves, and residuals of sums.

In: an equation of `dequantize_p` or `feed_back_p`. Out: its rule: blocks of the last
dimension stay together; the sum of a gradient waits for its residual.
"""

from jax.extend.core import JaxprEqn

from shardfn._core.make_rule import make_rule
from shardfn._core.op_sharding_rule import OpShardingRule, factor_names
from shardfn._core.quantized_leaf import dequantize_p
from shardfn._core.residual import feed_back_p
from shardfn._core.rule_registry import register_rule
from shardfn.rules._factors import shape_of


@register_rule(dequantize_p)
def _dequantize(eqn: JaxprEqn) -> OpShardingRule:
    """`a (b c), a b -> a (b c)  whole={c}` for blocks of `c` elements."""
    shape, block = shape_of(eqn), eqn.params["block"]
    *front, blocks, inside = factor_names(len(shape) + 1)
    elements = [*front, (blocks, inside)]
    return make_rule(
        eqn,
        [elements, [*front, blocks]],
        [elements],
        sizes={blocks: shape[-1] // block, inside: block},
        whole=[inside],
    )


@register_rule(feed_back_p)
def _feed_back(eqn: JaxprEqn) -> OpShardingRule:
    """`a b, n a b -> a b, n a b  reduce={n}` with a row of `n` per term."""
    rows, *dims = factor_names(len(shape_of(eqn)) + 1)
    values = [dims, [rows, *dims]]
    return make_rule(eqn, values, values, reduce=[rows], linear="all", terms=rows)
