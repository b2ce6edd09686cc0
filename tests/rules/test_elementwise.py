"""Elementwise rules."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from completeness import needlessly_nonlinear
from harness import (
    assert_all_match_unsharded,
    assert_every_factor_matches_unsharded,
    equation_of,
    integers,
)
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import JaxprEqn, Primitive
from table import Row, table

from shardfn._core.compat import beta_types_vary, primitives
from shardfn._core.rule_registry import rule_of

EACH = ({0}, {1})
ALL = ({0, 1},)
BF16 = jnp.bfloat16


@table(
    Row(lax.neg, ((8, 5),), "a b -> a b", ({0},), flat=True),
    Row(lax.mul, ((8, 5), (8, 5)), "a b, a b -> a b", EACH, flat=True),
    Row(lambda x: x * 2, ((8,),), "a,  -> a", EACH, flat=True),
    Row(lax.mul, ((8, 5), (1, 5)), "a b, c b -> a b", EACH),
    Row(lax.add, ((8, 5), (8, 5)), "a b, a b -> a b", ALL, flat=True),
    Row(lax.add, ((), ()), ",  ->", ALL, flat=True),
    Row(lax.sub, ((8,), ()), "a,  -> a", ALL, flat=True),
    Row(lax.complex, ((8,), (8,)), "a, a -> a", ALL, flat=True),
    Row(lax.div, ((8, 5), (8, 5)), "a b, a b -> a b", ({0},), flat=True, rtol=1e-6),
    Row(
        lambda x, y: lax.select_n(x > 0, x, y),
        ((8, 5), (8, 5)),
        "a b, a b, a b -> a b",
        ({1, 2},),
        flat=True,
        name="select_n",
    ),
    Row(
        lambda x, y: lax.select_n(x[0, 0] > 0, x, y),
        ((8, 5), (8, 5)),
        ", a b, a b -> a b",
        ({1, 2},),
        flat=True,
        name="select_n",
    ),
    Row(lambda x: lax.clamp(-1.0, x, 0.5), ((8,),), ", a,  -> a", flat=True),
    Row(lax.square, ((8,),), "a -> a", flat=True),
    Row(lambda x: x**3, ((8,),), "a -> a", flat=True),
    Row(lax.max, ((8,), (8,)), "a, a -> a", flat=True),
    Row(lax.stop_gradient, ((8,),), "a -> a", ({0},), flat=True),
    Row(lambda x: jnp.array(x, copy=True), ((8,),), "a -> a", ({0},), flat=True),
    Row(lambda x: lax.reduce_precision(x, 5, 3), ((8,),), "a -> a", flat=True),
    Row(lambda x: x.astype(BF16), ((8,),), "a -> a", flat=True),
    Row(lambda x: x.astype(jnp.int32), ((8,),), "a -> a", flat=True),
    Row(
        lambda x: x.astype(jnp.float32),
        (integers((8,), BF16),),
        "a -> a",
        ({0},),
        flat=True,
    ),
    Row(
        lambda x: x.astype(jnp.float32),
        (integers((8,), jnp.int32),),
        "a -> a",
        flat=True,
    ),
    Row(lax.real, (integers((8,), jnp.complex64),), "a -> a", ({0},), flat=True),
    Row(lax.conj, (integers((8,), jnp.complex64),), "a -> a", ({0},), flat=True),
    Row(lax.bitwise_and, (integers((8,), jnp.int32),) * 2, "a, a -> a", flat=True),
    Row(lax.mul, (integers((8,), jnp.int8),) * 2, "a, a -> a", EACH, flat=True),
    Row(lax.div, (integers((8,), jnp.int32),) * 2, "a, a -> a", flat=True),
)
def test_elementwise_rule(row):
    row.check()


ONE_OPERAND = (
    "abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh "
    "digamma erf erf_inv erfc exp exp2 expm1 floor lgamma log log1p log2 logistic "
    "one_minus_square round rsqrt sign sin sinh sqrt tan tanh"
)
TWO_OPERANDS = (
    "atan2 eq eq_to ge gt igamma igamma_grad_a igammac le le_to lt lt_to min ne "
    "nextafter polygamma pow rem zeta"
)
WITH_ACCURACY = (
    "cbrt cos exp exp2 expm1 log log1p log2 logistic rsqrt sin sqrt tan tanh"
)
INTEGER = (
    "clz not or population_count shift_left shift_right_arithmetic "
    "shift_right_logical xor"
)


def made_by(primitive: Primitive, args: list[Any]) -> tuple[JaxprEqn, list[Any]]:
    params: dict[str, Any] = {}
    if primitive.name in WITH_ACCURACY.split():
        params = {"accuracy": None}
    if primitive.name == "round":
        params = {"rounding_method": lax.RoundingMethod.TO_NEAREST_EVEN}
    return equation_of(lambda *a: primitive.bind(*a, **params), *args)


@pytest.mark.parametrize("names, count", [(ONE_OPERAND, 1), (TWO_OPERANDS, 2)])
def test_functions_are_mapped_and_not_linear(names, count):
    cases = []
    for primitive in primitives(*names.split()):
        scale = 1 if primitive.name in ("floor", "round") else 0.125
        args = [abs(integers((6,), seed=i)) + 0.25 + i for i in range(count)]
        args = [(x * scale).astype(np.float32) for x in args]
        eqn, values = made_by(primitive, args)
        rule = rule_of(eqn)
        assert str(rule) == ", ".join("a" * count) + " -> a"
        assert rule.flat and not rule.linear
        to_neighbour = [0] if primitive.name == "nextafter" else []
        assert needlessly_nonlinear(eqn, values) == to_neighbour, str(primitive)
        cases.append((eqn, values))
    assert_all_match_unsharded(cases, rtol=1e-5)


def test_integer_functions_are_mapped():
    cases = []
    for primitive in primitives(*INTEGER.split()):
        count = 1 if primitive.name in ("clz", "not", "population_count") else 2
        args = [integers((6,), jnp.uint32, seed=i) * 0x11111111 for i in range(2)]
        if "shift" in primitive.name:
            args[1] = args[1] % 7 + 1
        cases.append(made_by(primitive, args[:count]))
        assert not rule_of(cases[-1][0]).linear
    assert_all_match_unsharded(cases)


def test_incomplete_beta_is_mapped_where_jax_can():
    args = [jnp.abs(integers((8,), seed=i)) / 4 for i in range(3)]
    eqn, values = equation_of(lambda *a: lax.betainc(*a), *args)
    assert rule_of(eqn).is_splittable("a") == beta_types_vary()
    assert_every_factor_matches_unsharded(eqn, values, rtol=1e-5)


def test_polynomial_is_linear_in_its_coefficients():
    if not primitives("polynomial"):
        pytest.skip("this JAX has no polynomial")
    eqn, values = equation_of(
        lambda x, a, b: primitives("polynomial")[0].bind(x, a, b),
        integers((8,)),
        integers((8,), seed=1),
        integers((8,), seed=2),
    )
    assert rule_of(eqn).linear == (frozenset({1, 2}),)
    assert_every_factor_matches_unsharded(eqn, values)


def test_booleans_are_never_summed():
    eqn, _ = equation_of(lambda x: x.reshape(-1), jnp.ones((4, 2), bool))
    assert rule_of(eqn).linear == ()


def test_widened_integers_wrap_at_another_bound():
    eqn, _ = equation_of(
        lambda x: jax.lax.dot(x, x, preferred_element_type=jnp.int32),
        integers((4, 4), jnp.int8),
    )
    assert rule_of(eqn).linear == ()


def test_names_and_platforms_are_passed_on():
    eqn, _ = equation_of(lambda x: checkpoint_name(x, "h"), integers((8,)))
    assert str(rule_of(eqn)) == "a -> a" and rule_of(eqn).linear
    platforms = {"cpu": lambda x: x + 1, "default": lambda x: x}
    eqn, _ = equation_of(
        lambda x: lax.platform_dependent(x, **platforms),
        integers((8,)),
        name="platform_index",
    )
    assert str(rule_of(eqn)) == "->"
