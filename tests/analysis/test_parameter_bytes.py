"""In: steps that move the same parameters in different ways. Out: M, the bytes of these
parameters, is the same for all of them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sharded_and_plain import make_mesh

import shardfn

LAYERS = {"a": np.eye(16, dtype=np.float32), "b": np.eye(16, dtype=np.float32)}


def two_layers(params, x):
    return (jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"]) ** 2).sum()


def stacked(params, x):
    layers = jnp.stack([params["a"], params["b"]])
    return (jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, layers)[0] ** 2).sum()


def accumulated(params, x):
    parts = x.reshape(4, -1, 16)
    return jax.lax.scan(lambda s, x: (s + two_layers(params, x), None), 0.0, parts)[0]


def stacked_in_microbatches(params, x):
    parts = x.reshape(4, -1, 16)
    return jax.lax.scan(lambda s, x: (s + stacked(params, x), None), 0.0, parts)[0]


def tied(params, x):
    tied = two_layers({"a": params["a"], "b": params["a"].T}, x)
    return tied + (x @ params["b"]).sum()


def two_dtypes(params, x):
    narrow = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
    low = two_layers(narrow, x.astype(jnp.bfloat16)).astype(jnp.float32)
    return low + two_layers(params, x)


@pytest.mark.parametrize(
    "loss",
    [
        two_layers,
        stacked,
        accumulated,
        stacked_in_microbatches,
        tied,
        two_dtypes,
    ],
)
@pytest.mark.parametrize("again", ["auto", True, False])
def test_m_counts_each_parameter_once(loss, again) -> None:
    """However often it moves, in whatever pieces: two matrices in float32."""

    def step(state, x):
        value, g = jax.value_and_grad(loss)(state, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, g), value

    sharded = shardfn.fully_shard(
        step, make_mesh("4"), min_size=2, reshard_after_forward=again
    )
    plan = sharded.plan(LAYERS, np.ones((16, 16), np.float32))
    assert plan.parameter_bytes == 2 * 4 * 16 * 16


def test_m_leaves_out_what_only_the_optimizer_gathers() -> None:
    """A matrix that an orthogonalization makes is no parameter."""

    def step(state, x):
        g = jax.grad(two_layers)(state, x)
        return jax.tree.map(lambda w, g: w - g @ g.T @ g, state, g), ()

    plan = shardfn.fully_shard(step, make_mesh("4"), min_size=2).plan(
        LAYERS, np.ones((16, 16), np.float32)
    )
    assert any(c.phase == "update" for c in plan.collectives)
    assert plan.parameter_bytes == 2 * 4 * 16 * 16


@pytest.mark.parametrize("again", ["auto", True, False])
def test_m_counts_each_piece_of_a_stack(again) -> None:
    """Layers that are written out, each of which takes its own."""

    def step(state, x):
        def loss(w):
            y = x
            for i in range(3):
                y = jnp.tanh(y @ w[i])
            return jnp.sum(y @ w[0].T)

        value, g = jax.value_and_grad(loss)(state)
        return state - 0.1 * g, value

    sharded = shardfn.fully_shard(
        step, make_mesh("4"), min_size=2, reshard_after_forward=again
    )
    w = np.ones((3, 16, 16), np.float32)
    plan = sharded.plan(w, np.ones((16, 16), np.float32))
    assert plan.parameter_bytes == w.nbytes
