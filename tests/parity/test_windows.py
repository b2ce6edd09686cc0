"""In: steps that read or write windows of stored arrays, each row its own, where
devices split a dimension that the windows cover in full. Out: as the plain step.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from plan_helpers import cpu_mesh

from shardfn.testing import assert_parity

ROWS, LENGTH, HEADS, WIDTH = 4, 6, 8, 3


def decode(p: Any, x: jax.Array, at: jax.Array) -> Any:
    """A cache of keys, in which each sequence is at another token."""
    keys = jnp.einsum("bd,dhe->bhe", x, p["keys"])
    put = jax.vmap(lambda c, k, i: lax.dynamic_update_slice(c, k[None], (i, 0, 0)))
    cache = put(p["cache"], keys, at)
    scores = jax.nn.softmax(jnp.einsum("bhe,bthe->bht", keys, cache))
    return p | {"cache": cache}, jnp.einsum("bht,bthe->bhe", scores, cache)


def added(p: Any, x: jax.Array, at: jax.Array) -> Any:
    """The gradient of windows of a table: it adds windows to zeros."""

    def loss_fn(p: Any) -> jax.Array:
        rows = jax.vmap(lambda i: lax.dynamic_slice(p["table"], (i, 0), (2, HEADS)))(at)
        return jnp.mean(jnp.sin(rows) * x[:, :1, None])

    loss, grads = jax.value_and_grad(loss_fn)(p)
    return jax.tree.map(lambda w, g: w - g, p, grads), loss


STEPS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    "decode": (
        decode,
        {"keys": (HEADS, HEADS, WIDTH), "cache": (ROWS, LENGTH, HEADS, WIDTH)},
        {"keys": {"data": 1}, "cache": {"data": 2}},
    ),
    "added": (added, {"table": (LENGTH, HEADS)}, {"table": {"data": 1}}),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("name", STEPS)
def test_windows_that_cover_what_is_split(name: str, devices: int) -> None:
    step, shapes, shard = STEPS[name]
    rng = np.random.default_rng(0)
    state = {
        key: jnp.asarray(rng.normal(size=shape), jnp.float32)
        for key, shape in shapes.items()
    }
    x = jnp.asarray(rng.normal(size=(ROWS, HEADS)), jnp.float32)
    at = np.array([2, 0, 4, 1], np.int32)
    options = dict(state_argnums=0, batch_spec=jax.P(), shard=shard, stationary=True)
    assert_parity(step, cpu_mesh(devices), state, x, at, **options)
