"""In: steps on a mesh of two axes whose plans or whose users tie values together. Out:
the plain step's numbers: a tied value that is replicated over an axis is still known to
be, so that results made of it can be returned.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from sharded_and_plain import make_mesh

from shardfn.testing import assert_parity

X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)


def users(state, x):
    """A replicated value and rows of the batch, tied by the user."""
    w, x = lax.optimization_barrier((state["w"] * 2.0, x))
    return {**state, "w": w / 4.0}, (x @ w).sum()


def again(state, x):
    """`w` is gathered for the rows, and again, behind them, for a product of its own
    that the new state is made of."""
    h = jnp.tanh(x @ state["w"]) @ state["head"]
    power = state["w"] @ state["w"]
    return {**state, "w": state["w"] - 0.1 * power}, (h**2).mean()


def layers(state, x):
    def loss(state):
        h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, state["layers"])
        return (h**2).mean()

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value


@pytest.mark.parametrize(
    "step, options", [(users, {}), (again, {}), (layers, {"prefetch": 1})]
)
def test_what_is_tied_stays_replicated(step, options) -> None:
    shapes = {"w": (8, 8), "head": (8, 64), "layers": (3, 8, 8)}
    rng = np.random.default_rng(1)
    state = {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}
    axes = ("replica", "data")
    assert_parity(step, make_mesh("2x4"), state, X, axis=axes, min_size=8, **options)
