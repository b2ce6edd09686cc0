"""Rules of sorts: the sorted dimension whole, the others mapped.

In: an equation that orders the elements of one dimension. Out: its rule.
"""

from jax.extend.core import JaxprEqn

from shardfn._core.compat import primitives
from shardfn._core.make_rule import make_rule
from shardfn._core.op_sharding_rule import OpShardingRule, factor_names
from shardfn._core.rule_registry import register_rule
from shardfn.rules._factors import shape_of


@register_rule(*primitives("sort"))
def _sort(eqn: JaxprEqn) -> OpShardingRule:
    """`a b, a b -> a b, a b  whole={b}` for `dimension=1`."""
    names = factor_names(len(shape_of(eqn)))
    count = len(eqn.invars)
    whole = [names[eqn.params["dimension"]]]
    return make_rule(eqn, [names] * count, [names] * count, whole=whole)


@register_rule(*primitives("top_k"))
def _top_k(eqn: JaxprEqn) -> OpShardingRule:
    """`a b -> a c, a c  whole={b, c}` for `axis=1`: values and indices."""
    return _selected(eqn, eqn.params["axis"])


@register_rule(*primitives("approx_top_k"))
def _approx_top_k(eqn: JaxprEqn) -> OpShardingRule:
    """`a b -> a c, a c  whole={b, c}` for `reduction_dimension=1`."""
    return _selected(eqn, eqn.params["reduction_dimension"])


def _selected(eqn: JaxprEqn, axis: int) -> OpShardingRule:
    *names, found = factor_names(len(shape_of(eqn)) + 1)
    selected = list(names)
    selected[axis] = found
    whole = [names[axis], found]
    return make_rule(eqn, [names], [selected] * len(eqn.outvars), whole=whole)
