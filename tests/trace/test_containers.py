"""In: states and batches of classes that convert their leaves when they are made. Out:
what the plain step gives; no abstract value is put into them.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardfn


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Pair:
    """Takes what `jnp.asarray` takes, and asks it for its shape."""

    w: Any
    b: Any

    def __post_init__(self) -> None:
        self.w, self.b = jnp.asarray(self.w), jnp.asarray(self.b)
        assert self.w.ndim == 2 and self.b.ndim == 1


MESH = jax.make_mesh((8,), ("data",))
STATE = Pair(np.arange(48.0, dtype=np.float32).reshape(16, 3), np.ones(9, np.float32))
BATCH = Pair(np.ones((8, 16), np.float32), np.ones(8, np.float32))


def step(state: Pair, batch: Pair) -> Any:
    loss = jnp.mean((batch.w @ state.w).sum(1) * batch.b)
    return Pair(state.w + 1, state.b * 2), {"loss": loss, "pair": state}


def nested(state: dict[str, Pair], batch: Pair) -> Any:
    new, metrics = step(state["a"], batch)
    return {"a": new}, metrics["loss"]


def per_device(state: Pair, batch: Pair) -> Any:
    """As under `pmap`."""
    loss = lax.pmean(jnp.mean((batch.w @ state.w).sum(1) * batch.b), "data")
    return Pair(state.w + loss, state.b), loss


@pytest.mark.parametrize("step", [step, nested], ids=["state", "nested"])
def test_classes_that_convert_their_leaves(step) -> None:
    state: Any = {"a": STATE} if step is nested else STATE
    sharded = shardfn.fully_shard(step, MESH, min_size=8)
    mine, theirs = sharded.shard(state), state
    for _ in range(2):
        mine, got = sharded(mine, BATCH)
        theirs, expected = jax.jit(step)(theirs, BATCH)
        for a, b in zip(
            jax.tree.leaves((sharded.unshard(mine), got)),
            jax.tree.leaves((theirs, expected)),
            strict=True,
        ):
            np.testing.assert_array_equal(a, b)
    assert jax.tree.structure(mine) == jax.tree.structure(state)
    assert "all_gather" in str(sharded.plan(state, BATCH))


def test_init_makes_such_a_state() -> None:
    """Their own shapes, and what cannot hold anything but arrays says so."""

    def create(key: jax.Array) -> dict[str, Pair]:
        return {"a": Pair(jax.random.normal(key, (16, 3)), jnp.ones(9))}

    sharded, key = shardfn.fully_shard(nested, MESH, min_size=8), jax.random.key(0)
    state = sharded.init(create, key)
    assert jax.tree.structure(state) == jax.tree.structure(create(key))
    assert state["a"].w.sharding.spec == jax.P("data")
    new, loss = sharded(sharded.init(create, key), BATCH)
    made = jax.jit(create)(key)
    for a, b in zip(
        jax.tree.leaves((sharded.unshard(state), sharded.unshard(new), loss)),
        jax.tree.leaves((made, *jax.jit(nested)(made, BATCH))),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    for method in (
        lambda: sharded.abstract(create, key),
        lambda: sharded.shardings(new),
    ):
        with pytest.raises(shardfn.ShardingError, match="cannot put .* containers of"):
            method()


def test_a_step_per_device() -> None:
    sharded = shardfn.fully_shard(per_device, MESH, min_size=8)
    state, loss = sharded(sharded.shard(STATE), BATCH)
    assert loss == STATE.w.sum()
    np.testing.assert_array_equal(sharded.unshard(state).w, STATE.w + loss)


def test_a_state_in_another_container_is_named() -> None:
    def swap(state, batch):
        return {"w": state.w, "b": state.b}, ()

    with pytest.raises(shardfn.ShardingError, match="the same leaves in other contain"):
        shardfn.fully_shard(swap, MESH, min_size=8)(STATE, BATCH)


@flax.struct.dataclass
class Counter64:
    """Makes arrays of its fields where these are numbers, as brax's `UInt64` does."""

    high: Any
    low: Any

    def __post_init__(self) -> None:
        for name in ("high", "low"):
            if isinstance(getattr(self, name), int | np.ndarray | jax.Array):
                value = jnp.asarray(getattr(self, name), jnp.uint32)
                object.__setattr__(self, name, value)


def test_containers_may_make_arrays_of_numbers() -> None:
    """So the library puts no numbers of its own into them."""

    def train_step(state: Any, batch: Any, key: jax.Array) -> Any:
        params, seen = state

        def loss_fn(ps: Any) -> jax.Array:
            return sum(jnp.mean(jnp.tanh(batch["x"] @ p) ** 2) for p in ps)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        params = [p - 0.1 * g for p, g in zip(params, grads, strict=True)]
        noise = jax.random.normal(key, batch["x"].shape)
        new = params, Counter64(seen.high, seen.low + jnp.uint32(1))
        return new, {"x": jnp.tanh(batch["x"] + noise)}, loss

    # More leaves than an unsigned number of the container has bits.
    state = [jnp.ones((16, 32)) / 16] * 40, Counter64(0, 0)
    batch = {"x": jnp.ones((32, 16))}
    step = shardfn.fully_shard(train_step, jax.make_mesh((8,), ("data",)), min_size=0)
    plain, sharded = state, step.shard(state)
    for i in range(2):
        key = jax.random.key(i)
        plain, _, expected = jax.jit(train_step)(plain, batch, key)
        sharded, _, loss = step(sharded, batch, key)
        np.testing.assert_allclose(loss, expected, rtol=1e-4)
    assert int(sharded[1].low) == 2
