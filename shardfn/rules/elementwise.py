"""Rules of elementwise ops: every dimension of every operand and result is mapped.

In: equations whose operands have the result's shape, have size 1 in some dimensions, or
are scalars. Out: one factor per dimension, and where a sum may pass through.
"""

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from shardfn._core.compat import beta_types_vary, primitives
from shardfn._core.make_rule import make_rule
from shardfn._core.one_platform import only_on_p
from shardfn._core.op_sharding_rule import OpShardingRule, factor_names
from shardfn._core.rule_registry import register_rule
from shardfn._core.sizes import keeps_numbers
from shardfn.rules._factors import dtype_of, result_dtype, result_shape, shape_of

_NONLINEAR = (
    "abs acos acosh and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil "
    "clamp clz cos cosh digamma eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt "
    "igamma igamma_grad_a igammac integer_pow is_finite le le_to lgamma log log1p log2 "
    "logistic lt lt_to max min ne nextafter not one_minus_square or polygamma "
    "population_count pow random_clone random_seed reduce_precision "
    "rem round rsqrt shift_left shift_right_arithmetic "
    "shift_right_logical sign sin sinh sqrt square tan tanh threefry2x32 xor zeta"
)
_EACH = "neg real imag conj copy stop_gradient name mul stage zeros_like"
_ALL = "add add_any sub complex"


def elementwise_rule(
    eqn: JaxprEqn, linear: str | list[list[int]] = ""
) -> OpShardingRule:
    """The rule of an elementwise op, `a b, a b -> a b`: each element of the results is
    computed from the elements of the operands at its place.

    Args:
      eqn: the equation. Each operand has the shape of the results, has size 1 in some
        dimensions, which get a factor of their own, or is a scalar, which has none.
      linear: in which operands the op is linear, as in `make_rule`.

    Returns:
      The frozen rule; it may run on blocks of flattened operands, too.
    """
    shape = result_shape(eqn)
    names = factor_names(len(shape))
    fresh = iter(factor_names(len(shape) * len(eqn.invars), len(shape)))
    operands = [
        [
            name if size == full else next(fresh)
            for name, size, full in zip(names, shape_of(eqn, i), shape, strict=False)
        ]
        for i in range(len(eqn.invars))
    ]
    return make_rule(
        eqn,
        operands,
        [names] * len(eqn.outvars),
        linear=linear,
        flat=all(tuple(dims) in ((), names) for dims in operands),
    )


@register_rule(*primitives(*_NONLINEAR.split()))
def _nonlinear(eqn: JaxprEqn) -> OpShardingRule:
    """`a b, a b -> a b`."""
    return elementwise_rule(eqn)


@register_rule(only_on_p, *primitives(*_EACH.split()))
def _each(eqn: JaxprEqn) -> OpShardingRule:
    """`a b, a b -> a b`, linear in every operand by itself."""
    return elementwise_rule(eqn, "each")


@register_rule(*primitives(*_ALL.split()))
def _all(eqn: JaxprEqn) -> OpShardingRule:
    """`a b, a b -> a b`, linear in all operands together."""
    return elementwise_rule(eqn, "all")


@register_rule(*primitives("regularized_incomplete_beta"))
def _beta(eqn: JaxprEqn) -> OpShardingRule:
    """`a, a, a -> a`; whole where JAX's own loop for it mistypes what varies."""
    rule = elementwise_rule(eqn)
    if beta_types_vary():
        return rule
    return make_rule(eqn, rule.operands, rule.results, whole=dict(rule.sizes))


@register_rule(*primitives("div"))
def _div(eqn: JaxprEqn) -> OpShardingRule:
    """`a b, a b -> a b`, linear in the dividend unless integers are rounded."""
    exact = jnp.issubdtype(result_dtype(eqn), jnp.inexact)
    return elementwise_rule(eqn, [[0]] if exact else "")


@register_rule(*primitives("select_n"))
def _select_n(eqn: JaxprEqn) -> OpShardingRule:
    """`a b, a b, a b -> a b`, linear in the cases together; `which` may be a scalar."""
    return elementwise_rule(eqn, [list(range(1, len(eqn.invars)))])


@register_rule(*primitives("polynomial"))
def _polynomial(eqn: JaxprEqn) -> OpShardingRule:
    """`a b, , -> a b`, linear in the coefficients together."""
    return elementwise_rule(eqn, [list(range(1, len(eqn.invars)))])


@register_rule(*primitives("convert_element_type"))
def _convert_element_type(eqn: JaxprEqn) -> OpShardingRule:
    """`a b -> a b`, linear if every value of the old dtype has an equal in the new one.

    Narrowing rounds each term, which is another result than rounding their sum.
    """
    old, new = dtype_of(eqn), result_dtype(eqn)
    is_linear = old == new or keeps_numbers(old, new)
    return elementwise_rule(eqn, "each" if is_linear else "")


@register_rule(*primitives("platform_index"))
def _constant(eqn: JaxprEqn) -> OpShardingRule:
    """` -> `: a scalar that is the same on every device."""
    return make_rule(eqn, [], [()])
