"""In: images that a step takes in another order, of whose dimensions the devices divide
none but that of rows. Out: as the plain step; rows are exchanged for parts of all.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plan_helpers import GATHERS, assert_steps_alike, cpu_mesh

import shardfn

ROWS, FEATURES = 24, (4, 6, 5)
PADDED = [(7, 9), (9, 17), (30,)]
"""Features that 8 devices do not divide, even all together."""
ORDER = np.random.default_rng(3).permutation(ROWS)


def mixed(x: jax.Array, order: jax.Array) -> jax.Array:
    """By numbers that the step is given, as in mixup."""
    return 0.7 * x + 0.3 * x[order]


def of_known_order(x: jax.Array, order: jax.Array) -> jax.Array:
    return x[ORDER] * x + order.mean()


def turned(x: jax.Array, order: jax.Array) -> jax.Array:
    return 0.7 * x + 0.3 * x[::-1] + order.mean()


def pairs(x: jax.Array, order: jax.Array) -> jax.Array:
    """Several rows for each."""
    return x + x[jnp.stack([order, order[::-1]], 1)].mean(1)


def with_gradient(x: jax.Array, order: jax.Array) -> jax.Array:
    return jnp.tanh(x)[order]


Mix = Callable[[jax.Array, jax.Array], jax.Array]
MIXES: list[Mix] = [mixed, of_known_order, turned, pairs, with_gradient]


def sharded(
    mix: Mix, *sizes: int, features: tuple[int, ...] = FEATURES
) -> tuple[Any, ...]:
    def train_step(p: Any, batch: Any) -> Any:
        def loss_fn(p: Any) -> jax.Array:
            x = mix(batch["x"] * p["gain"], batch["order"])
            return jnp.mean(jnp.tanh(x.reshape(len(x), -1) @ p["w"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(p)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), loss

    axis = ("replica", "data") if len(sizes) > 1 else "data"
    options = GATHERS | {"axis": axis, "min_size": 8}
    step = shardfn.fully_shard(train_step, cpu_mesh(*sizes), **options)
    rng = np.random.default_rng(0)
    p = {"gain": jnp.float32(1.5), "w": rng.normal(size=(math.prod(features), 9)) / 9}
    batch = {
        "x": jnp.asarray(rng.normal(size=(ROWS, *features)), jnp.float32),
        "order": jnp.asarray(rng.permutation(ROWS), jnp.int32),
    }
    p = jax.tree.map(lambda w: jnp.asarray(w, jnp.float32), p)
    return train_step, step, p, batch


@pytest.fixture
def bytes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of tests are too small for a further collective to be worth it."""
    for module in ("_propagation.exchange_rows", "_core.sent_bytes"):
        monkeypatch.setattr(f"shardfn.{module}.LATENCY_BYTES", 0)


@pytest.mark.covering(1)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("sizes", [(8,), (3,), (4,), (2, 4)], ids=str)
def test_steps_are_those_of_the_plain_step(
    mix: Mix, sizes: Any, bytes_alone: None
) -> None:
    assert_steps_alike(*sharded(mix, *sizes))


@pytest.mark.parametrize("mix", MIXES)
def test_rows_are_exchanged(mix: Mix, bytes_alone: None) -> None:
    _, step, p, batch = sharded(mix, 8)
    lines = step.plan(p, batch).collectives
    images = {c.op for c in lines if c.shape and math.prod(c.shape) % (ROWS * 120) == 0}
    assert images == {"all_to_all"}


@pytest.mark.covering(1)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("features", PADDED, ids=str)
def test_features_are_padded(mix: Mix, features: Any, bytes_alone: None) -> None:
    train_step, step, p, batch = sharded(mix, 8, features=features)
    assert_steps_alike(train_step, step, p, batch)
    wide = ROWS * -(-math.prod(features) // 8) * 8
    lines = step.plan(p, batch).collectives
    images = {c.op for c in lines if c.shape and math.prod(c.shape) % wide == 0}
    assert images == {"all_to_all"}


def test_features_are_not_padded_far(bytes_alone: None) -> None:
    """Zeros would be sent even where rows are gathered (limits.PADDED_FEATURES)."""
    train_step, step, p, batch = sharded(mixed, 8, features=(5, 7))
    assert_steps_alike(train_step, step, p, batch)
    lines = step.plan(p, batch).collectives
    forward = [c for c in lines if c.phase == "forward"]
    images = {(c.op, c.shape) for c in forward if math.prod(c.shape) >= ROWS * 35}
    assert images == {("all_gather", (ROWS, 5, 7))}
