"""In: steps with a `lax.cond` whose branches split what they return differently. Out:
no branch gathers it whole, and what runs is the plain step.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from plan_helpers import GATHERS, assert_steps_alike, cpu_mesh, shard_fn

import shardfn

SIZES = [(8,), (2, 4)]
SHAPES = {"a": (16, 24), "b": (24, 16)}


def chosen(state: Any, x: jax.Array) -> Any:
    """One branch returns rows of `a` where they are, one columns of `b`."""
    a = lax.cond(jnp.sum(x) > 0, lambda: 2 * state["a"], lambda: state["b"].T)
    return {"a": a, "b": state["b"] + 1}, jnp.sum(x)


def of_rows(state: Any, x: jax.Array) -> Any:
    """One branch returns rows of the batch, one rows of a leaf, one neither."""
    branches = [
        lambda: jnp.tanh(x @ state["b"].T),
        lambda: state["a"][:, :] * 3,
        lambda: jnp.ones_like(state["a"]),
    ]
    y = lax.switch(jnp.int32(jnp.sum(x)) % 3, branches)
    return {"a": state["a"] + y, "b": state["b"]}, jnp.sum(y * y)


@pytest.mark.covering(2)
@pytest.mark.parametrize("step", [chosen, of_rows])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("first", [-20.0, 0.0, 1.0, 2.0])
def test_steps_are_those_of_the_plain_step(step: Any, sizes: Any, first: float) -> None:
    rng = np.random.default_rng(0)
    state = {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in SHAPES.items()}
    x = jnp.zeros((16, 16)).at[0, 0].set(first)
    axis = ("replica", "data")[-len(sizes) :]
    case = shard_fn(step, cpu_mesh(*sizes), SHAPES, (16, 16), axis=axis)
    assert_steps_alike(step, case.step, state, x)


def test_a_leaf_is_exchanged_for_the_other_branch() -> None:
    rows = {"a": {"data": 0}, "b": {"data": 0}}
    case = shard_fn(chosen, cpu_mesh(8), SHAPES, (16, 16), shard=rows)
    moved = [line.op for line in case.plan.collectives if line.shape]
    assert moved == ["all_to_all"]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_an_update_in_a_branch_sends_no_more(sizes: Any) -> None:
    """Adafactor leaves updates split along a dimension of its statistics, the branch
    that skips an update along that of the parameters."""
    params = {"w": jnp.ones((3, 128, 256)) / 9, "v": jnp.ones((3, 256, 128)) / 9}
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 128)), jnp.float32)

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: Any) -> Any:
            return x + jnp.tanh(x @ w["w"]) @ w["v"], None

        return jnp.mean(lax.scan(layer, x, params)[0] ** 2)

    def update_bytes(tx: optax.GradientTransformation) -> float:
        def train_step(state: Any, x: jax.Array) -> Any:
            params, moments = state
            loss, grads = jax.value_and_grad(loss_fn)(params, x)
            updates, moments = tx.update(grads, moments, params)
            return (optax.apply_updates(params, updates), moments), loss

        axis = ("replica", "data")[-len(sizes) :]
        options = GATHERS | {"axis": axis, "min_size": 8}
        step = shardfn.fully_shard(train_step, cpu_mesh(*sizes), **options)
        state = params, tx.init(params)
        assert_steps_alike(train_step, step, state, x)
        lines = step.plan(state, x).collectives
        return sum(c.wire_bytes * c.times for c in lines if c.phase == "update")

    adafactor = optax.adafactor(1e-2)
    skipping = update_bytes(optax.apply_if_finite(adafactor, 5))
    assert skipping <= update_bytes(adafactor) + 64, "and whether all is finite"
