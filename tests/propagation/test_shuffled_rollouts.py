"""In: rollouts of environments, time by time, that are flattened, shuffled and cut into
minibatches, as in PPO, or of which each minibatch takes rows by their numbers. Out: the
plain step's values; observations of all environments are whole nowhere, and are moved
once if minibatches take rows of the same.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from plan_helpers import GATHERS, assert_steps_alike, cpu_mesh

import shardfn

TIMES, ENVIRONMENTS, ACTIONS, MINIBATCHES = 6, 24, 3, 2
SHAPES = [(16,), (4, 6, 5)]
EPOCHS = 2


@pytest.fixture(autouse=True)
def bytes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of tests are too small for a further collective to be worth it."""
    for module in ("_propagation.exchange_rows", "_core.sent_bytes"):
        monkeypatch.setattr(f"shardfn.{module}.LATENCY_BYTES", 0)


def policy(p: Any, seen: jax.Array) -> jax.Array:
    flat = seen.reshape(*seen.shape[:1], -1)
    return jax.nn.log_softmax(jnp.tanh(flat @ p["in"]) @ p["out"])


def act_all(p: Any, seen: jax.Array) -> Any:
    """A rollout: what was seen, done and gained, time by time."""

    def act(seen: jax.Array, _: None) -> Any:
        action = jnp.argmax(policy(p, seen), -1)
        gain = jnp.cos(action.astype(seen.dtype))
        then = jnp.tanh(seen * 0.9 + gain.reshape(-1, *[1] * (seen.ndim - 1)))
        return then, (seen, action, then.reshape(len(then), -1).sum(-1))

    return lax.scan(act, seen, None, length=TIMES)[1]


def flatten(rollout: Any) -> Any:
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rollout)


def cut(rows: Any) -> Any:
    return jax.tree.map(lambda x: x.reshape(MINIBATCHES, -1, *x.shape[1:]), rows)


def learn(p: Any, part: Any) -> Any:
    def loss_fn(p: Any) -> jax.Array:
        seen, action, gain = part
        chosen = jnp.take_along_axis(policy(p, seen), action[:, None], 1)[:, 0]
        return -jnp.mean(chosen * (gain - gain.mean()))

    loss, grads = jax.value_and_grad(loss_fn)(p)
    return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), loss


def shuffled(p: Any, batch: tuple[jax.Array, jax.Array]) -> Any:
    """Acts, then learns from what was seen in several orders."""
    seen, orders = batch
    rollout = act_all(p, seen)

    def epoch(p: Any, order: jax.Array) -> Any:
        mixed = jax.tree.map(lambda x: jnp.take(x, order, axis=0), flatten(rollout))
        return lax.scan(learn, p, cut(mixed))

    return lax.scan(epoch, p, orders)


def by_numbers(p: Any, batch: tuple[jax.Array, jax.Array]) -> Any:
    """Acts, then learns from minibatches of rows by their numbers."""
    seen, orders = batch
    flat = flatten(act_all(p, seen))

    def taken(p: Any, rows: jax.Array) -> Any:
        return learn(p, jax.tree.map(lambda x: x[rows], flat))

    return lax.scan(lambda p, order: lax.scan(taken, p, cut(order)), p, orders)


STEPS = [shuffled, by_numbers]


def rollouts(train_step: Any, shape: tuple[int, ...], *sizes: int) -> tuple[Any, ...]:
    axis = ("replica", "data") if len(sizes) > 1 else "data"
    specs = jax.P(axis), jax.P()
    options = GATHERS | {"axis": axis, "min_size": 8, "batch_spec": specs}
    step = shardfn.fully_shard(train_step, cpu_mesh(*sizes), **options)
    rng = np.random.default_rng(0)
    shapes = {"in": (int(np.prod(shape)), 16), "out": (16, ACTIONS)}
    weights = {k: rng.normal(size=s) / np.sqrt(s[0]) for k, s in shapes.items()}
    p = {k: jnp.asarray(w, jnp.float32) for k, w in weights.items()}
    seen = jnp.asarray(rng.normal(size=(ENVIRONMENTS, *shape)), jnp.float32)
    orders = [rng.permutation(TIMES * ENVIRONMENTS) for _ in range(EPOCHS)]
    return train_step, step, p, (seen, jnp.asarray(np.stack(orders), jnp.int32))


@pytest.mark.covering(2)
@pytest.mark.parametrize("train_step", STEPS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sizes", [(8,), (3,), (2, 4)], ids=str)
def test_steps_are_those_of_the_plain_step(
    train_step: Any, shape: Any, sizes: Any
) -> None:
    assert_steps_alike(*rollouts(train_step, shape, *sizes))


@pytest.mark.parametrize("train_step", STEPS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_observations_are_exchanged(train_step: Any, shape: Any) -> None:
    _, step, *args = rollouts(train_step, shape, 8)
    elements = TIMES * ENVIRONMENTS * int(np.prod(shape))
    lines = step.plan(*args).collectives
    seen = {c.op for c in lines if np.prod(c.shape, dtype=int) >= elements}
    assert "all_to_all" in seen
    assert "all_gather" not in seen


@pytest.mark.parametrize("shape", [*SHAPES, (15,)], ids=str)
def test_rows_that_minibatches_take_by_number_are_moved_once(shape: Any) -> None:
    """Of what is taken, each minibatch has its rows exchanged back."""
    _, step, *args = rollouts(by_numbers, shape, 8)
    lines = [c for c in step.plan(*args).collectives if c.op == "all_to_all"]
    rows, padded = TIMES * ENVIRONMENTS, -(-int(np.prod(shape)) // 8) * 8
    once, each = ([c for c in lines if c.times == n] for n in (1, EPOCHS * MINIBATCHES))
    assert len(lines) == 2 and np.prod(once[0].shape, dtype=int) == rows * padded
    assert each[0].shape == (rows // MINIBATCHES, padded)
