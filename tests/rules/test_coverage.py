"""Every primitive that JAX exports has a rule or a reason to have none."""

import jax
import jax.extend.random
import pytest
from jax.extend.core import Primitive, primitives

import shardfn._core.compat
import shardfn.rules
from shardfn._core.rule_registry import _registry

CONTROL_FLOW = "recursed into, its body has rules"
COLLECTIVE = "the step itself says where devices meet"
NO_RULE = {
    "after_all": "orders effects, holds no data",
    "all_gather": COLLECTIVE,
    "all_to_all": COLLECTIVE,
    "axis_index": COLLECTIVE,
    "call": CONTROL_FLOW,
    "closed_call": CONTROL_FLOW,
    "cond": CONTROL_FLOW,
    "create_token": "orders effects, holds no data",
    "custom_jvp_call": CONTROL_FLOW,
    "custom_lin": "stands only in the middle of JAX's own differentiation",
    "custom_linear_solve": CONTROL_FLOW,
    "custom_vjp_call": CONTROL_FLOW,
    "dce_sink": "has no result",
    "eval_jaxpr": CONTROL_FLOW,
    "get": "reads mutable state, which has no sharding of its own",
    "jit": CONTROL_FLOW,
    "mulhi": "JAX 0.10 to 0.12 cannot lower it inside shard_map on CPU",
    "optimization_barrier": "passes its operands on, however each is sharded",
    "pmax": COLLECTIVE,
    "pmin": COLLECTIVE,
    "ppermute": COLLECTIVE,
    "psum": COLLECTIVE,
    "ragged_all_to_all": COLLECTIVE,
    "remat2": CONTROL_FLOW,
    "scan": CONTROL_FLOW,
    "swap": "writes mutable state, which has no sharding of its own",
    "while": CONTROL_FLOW,
}

SEEN_IN_TRAINING_STEPS = """
abs add add_any broadcast_in_dim convert_element_type div dot_general eq exp gather ge
integer_pow is_finite log lt max mul neg pow reduce_max reduce_sum reshape scatter-add
select_n sign sqrt square stop_gradient sub transpose conv_general_dilated copy gt rev
rsqrt slice squeeze tanh and bitcast_convert_type concatenate iota le min ne or pad
random_bits random_fold_in random_split random_unwrap random_wrap rem
shift_right_logical split argmax cumsum dynamic_slice erf_inv erfc log1p logistic not
reduce_or reduce_window_max scatter select_and_scatter_add sort clamp cos
dynamic_update_slice empty2 floor random_seed reduce_and reduce_window_sum sin stack
tile unstack cbrt ceil cholesky complex cumprod device_put digamma erf expm1 imag le_to
lgamma nextafter platform_index random_gamma real reduce_precision round scatter-max svd
top_k triangular_solve xor acos acosh argmin asin asinh atan atan2 atanh bessel_i0e
bessel_i1e clz conj cosh eigh exp2 fft igamma lt_to lu name
polygamma population_count qr ragged_dot_general random_clone reduce_min reduce_prod
regularized_incomplete_beta scatter-mul shift_left sinh tan
"""
"""Of 262 real training steps, the primitives that are JAX's own and hold no jaxpr."""


def _exported() -> dict[str, Primitive]:
    modules = (jax.lax, jax.lax.linalg, primitives, jax.extend.random)
    values = (v for module in modules for v in vars(module).values())
    return {p.name: p for p in values if isinstance(p, Primitive)}


@pytest.mark.parametrize("name", sorted(_exported()))
def test_exported_primitive_has_a_rule_or_a_reason(name):
    assert (_exported()[name] in _registry) != (name in NO_RULE)


@pytest.mark.parametrize("name", SEEN_IN_TRAINING_STEPS.split())
def test_primitive_of_real_steps_has_a_rule(name):
    (primitive,) = shardfn._core.compat.primitives(name)
    assert primitive in _registry


def test_a_name_that_this_jax_does_not_have_is_left_out():
    assert shardfn._core.compat.primitives("no_such_primitive", "add") == (
        jax.lax.add_p,
    )
