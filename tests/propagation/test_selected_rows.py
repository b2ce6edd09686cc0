"""In: steps that select some rows of the batch, by a slice at a fixed or computed place
or by numbers. Out: as the plain step, each device with its part of these rows.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plan_helpers import assert_steps_alike, cpu_mesh

import shardfn

pytestmark = pytest.mark.standard_promotion

ROWS, WIDTH, VOCABULARY = 32, 12, 40
CHOSEN = np.random.default_rng(5).permutation(ROWS)[:16]

Loss = Callable[[Any, jax.Array], jax.Array]


def of_tokens(p: Any, tokens: jax.Array) -> jax.Array:
    """A sum over rows of what is nonlinear in them."""
    x = jnp.tanh(p["table"][tokens].sum(1) @ p["w"])
    return jnp.sum(jax.nn.logsumexp(x, axis=-1))


def of_halves(p: Any, tokens: jax.Array) -> jax.Array:
    half = len(tokens) // 2
    return of_tokens(p, tokens[:half]) + 2 * of_tokens(p, tokens[half:])


def of_every_other(p: Any, tokens: jax.Array) -> jax.Array:
    return of_tokens(p, tokens[::2])


def of_chosen(p: Any, tokens: jax.Array) -> jax.Array:
    return of_tokens(p, tokens[CHOSEN])


def descend(p: Any, loss: jax.Array, grads: Any) -> Any:
    return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), loss


def whole(loss_fn: Loss) -> Callable[..., Any]:
    def train_step(p: Any, tokens: jax.Array) -> Any:
        return descend(p, *jax.value_and_grad(loss_fn)(p, tokens))

    return train_step


def accumulated(p: Any, tokens: jax.Array) -> Any:
    """Gradients of microbatches that a loop cuts out of the batch."""
    count = len(tokens) // 2

    def add(i: jax.Array, total: Any) -> Any:
        part = jax.lax.dynamic_slice_in_dim(tokens, i * count, count)
        return jax.tree.map(jnp.add, total, jax.value_and_grad(of_tokens)(p, part))

    zero = jnp.float32(0), jax.tree.map(jnp.zeros_like, p)
    return descend(p, *jax.lax.fori_loop(0, 2, add, zero))


STEPS = [accumulated, *map(whole, (of_halves, of_every_other, of_chosen))]


@pytest.mark.covering(1)
@pytest.mark.parametrize("train_step", STEPS, ids=lambda step: step.__qualname__)
@pytest.mark.parametrize("sizes", [(8,), (2,), (2, 4)], ids=str)
def test_selected_rows_are_split(
    train_step: Any, sizes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No device computes what another does: that would be a warning."""
    monkeypatch.setattr("shardfn._api.plan_warnings.REPLICATED_FLOPS", 0)
    rng = np.random.default_rng(0)
    shapes = {"table": (VOCABULARY, WIDTH), "w": (WIDTH, 8)}
    p = {k: jnp.asarray(rng.normal(size=s) / 9, jnp.float32) for k, s in shapes.items()}
    tokens = jnp.asarray(rng.integers(0, VOCABULARY, (ROWS, 5)), jnp.int32)
    step = shardfn.fully_shard(
        train_step, cpu_mesh(*sizes), min_size=16, stationary=False
    )
    state = assert_steps_alike(train_step, step, p, tokens)
    moved = [c for c in step.plan(state, tokens).collectives if c.shape]
    assert not [c for c in moved if c.op == "all_reduce"]
    assert not [c for c in moved if c.dtype == "float32" and not c.path]
