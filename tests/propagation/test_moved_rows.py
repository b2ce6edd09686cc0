"""In: steps in which rows of the batch are laid out anew behind some layers, such as
tokens of all rows in chunks. Out: as the plain step, and what goes back to the layers
goes back to the rows as they came in, once.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plan_helpers import assert_steps_alike, cpu_mesh

import shardfn

ROWS, TOKENS, WIDTH, LAYERS, VOCABULARY = 16, 8, 24, 3, 40
MOST = 3
"""How often a device sends its rows at most: less than in one layer's backward pass."""


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    return x + jnp.tanh(centred @ w) * jax.nn.silu(x)


def scanned(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0]


def repeated(x: jax.Array, w: jax.Array) -> jax.Array:
    one = jax.checkpoint(layer)
    return jax.lax.scan(lambda x, w: (one(x, w), None), x, w)[0]


def unrolled(x: jax.Array, w: jax.Array) -> jax.Array:
    return functools.reduce(layer, w, x)


def entropy(x: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
    logits = x @ head
    hit = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.sum(jax.nn.logsumexp(logits, axis=-1) - hit)


def make_step(layers: Any, chunks: int) -> Any:
    def loss_fn(p: Any, batch: Any) -> jax.Array:
        x = layers(p["table"][batch["inputs"]], p["w"])
        chunked = x.reshape(chunks, -1, WIDTH), batch["targets"].reshape(chunks, -1)

        @jax.checkpoint
        def add(total: jax.Array, chunk: Any) -> Any:
            return total + entropy(chunk[0], p["head"], chunk[1]), None

        total, _ = jax.lax.scan(add, jnp.float32(0), chunked)
        return total / batch["targets"].size

    def train_step(p: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(p, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), loss

    return train_step


@pytest.mark.covering(2)
@pytest.mark.parametrize("layers", [scanned, repeated, unrolled])
@pytest.mark.parametrize("chunks", [2, 4, 16, 32])
@pytest.mark.parametrize("sizes", [(8,), (4,), (2, 4)], ids=str)
def test_rows_go_back_once(layers: Any, chunks: int, sizes: Any) -> None:
    rng = np.random.default_rng(0)
    shapes = {
        "table": (VOCABULARY, WIDTH),
        "w": (LAYERS, WIDTH, WIDTH),
        "head": (WIDTH, VOCABULARY),
    }
    p = {k: jnp.asarray(rng.normal(size=s) / 9, jnp.float32) for k, s in shapes.items()}
    tokens = jnp.asarray(
        rng.integers(0, VOCABULARY, (ROWS, TOKENS + 1)), dtype=jnp.int32
    )
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    train_step = make_step(layers, chunks)
    step = shardfn.fully_shard(
        train_step, cpu_mesh(*sizes), min_size=16, stationary=False
    )
    state = assert_steps_alike(train_step, step, p, batch)
    shapes_of_all = [(ROWS, TOKENS, WIDTH), (chunks, ROWS * TOKENS // chunks, WIDTH)]
    activations = [
        c
        for c in step.plan(state, batch).collectives
        if c.shape in shapes_of_all and not c.path
    ]
    back = [c for c in activations if c.phase == "backward"]
    sent = sum(c.wire_bytes * c.times for c in back)
    assert 0 < sent <= MOST * 4 * ROWS * TOKENS * WIDTH / math.prod(sizes)
