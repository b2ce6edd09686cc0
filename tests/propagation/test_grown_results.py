"""In: operations whose results are larger than the weights that they take: weights with
noise of each row's own, or styled by it. Out: plans that gather the weights, not rows
of what is made of them; and the numbers of the plain step.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from plan_helpers import cpu_mesh

import shardfn
from shardfn.testing import assert_parity

ROWS, WIDE = 48, 16
OPTIONS: dict[str, Any] = {"min_size": 0, "stationary": False}


def noise_of_rows(w: jax.Array, key: jax.Array) -> jax.Array:
    return w[None] + 0.1 * jax.random.normal(key, (ROWS, WIDE, WIDE))


def noise_of_keys(w: jax.Array, key: jax.Array) -> jax.Array:
    keys = jax.random.split(key, ROWS)
    return jax.vmap(lambda k: w + 0.1 * jax.random.normal(k, w.shape))(keys)


def styled(w: jax.Array, key: jax.Array) -> jax.Array:
    return w[None] * jax.random.normal(key, (ROWS, WIDE))[:, :, None]


def step_with(weights: Any) -> Any:
    def step(state: Any, x: jax.Array) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            key = jax.random.fold_in(jax.random.key(0), state["step"])
            return jnp.square(jnp.einsum("bd,bdf->bf", x, weights(w, key))).mean()

        value, grad = jax.value_and_grad(loss)(state["w"])
        return {"w": state["w"] - 0.1 * grad, "step": state["step"] + 1}, value

    return step


@pytest.mark.parametrize("weights", [noise_of_rows, noise_of_keys, styled])
def test_the_weight_is_gathered(weights: Any) -> None:
    state = {
        "w": jax.random.normal(jax.random.key(1), (WIDE, WIDE)),
        "step": jnp.int32(0),
    }
    x = jax.random.normal(jax.random.key(2), (ROWS, WIDE))
    step = step_with(weights)
    plan = shardfn.fully_shard(step, cpu_mesh(8), **OPTIONS).plan(state, x)
    assert {(c.op, c.path) for c in plan.collectives if c.shape} == {
        ("all_gather", "w"),
        ("psum_scatter", "w"),
    }
    assert_parity(step, cpu_mesh(8), state, x, **OPTIONS)
