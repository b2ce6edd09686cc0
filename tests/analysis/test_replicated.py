"""In: steps of which nothing, or something, is split. Out: the share of a device's
FLOPs that every device repeats, in the plan, and a warning if it is most of many.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from plan_helpers import cpu_mesh

import shardfn
from shardfn import ReplicatedComputeWarning


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def trained(w: jax.Array, x: jax.Array) -> jax.Array:
    return w - jax.grad(loss)(w, x)


def minibatches(w: jax.Array, data: jax.Array, key: jax.Array) -> jax.Array:
    """Shuffled minibatches of data that the step has made, as in PPO."""
    order = jax.random.permutation(key, data.shape[0])
    groups = data[order].reshape(4, -1, data.shape[1])
    return lax.scan(lambda w, x: (trained(w, x), None), w, groups)[0]


def simulated(size: int) -> Any:
    """A step that makes rows which devices do not divide."""

    def step(w, key):
        data = jax.random.normal(key, (size - 4, size))
        return minibatches(w, data, key), 0.0

    return step


def constrained(w, key):
    data = shardfn.constrain(jax.random.normal(key, (64, 64)), P("data"))
    return minibatches(w, data, key), 0.0


def plan_of(step: Any, size: int, *batch: Any) -> shardfn.Plan:
    """The plan of a step with one replicated weight."""
    w = jax.ShapeDtypeStruct((size, size), jnp.float32)
    return shardfn.fully_shard(step, cpu_mesh(8), min_size=2**30).plan(w, *batch)


def test_what_every_device_repeats_is_a_line_of_the_plan() -> None:
    plan = plan_of(simulated(64), 64, jax.random.key(0))
    assert plan.work.share == 1 and plan.work.replicated == 2 * 2 * 60 * 64**2
    assert (
        "  100% of a device's FLOPs are the same on every device, most of them at "
        "test_replicated.py:" in str(plan)
    )


@pytest.mark.parametrize("batch", ["split", "constrained", "rows"])
def test_what_is_split_is_not(batch: str) -> None:
    if batch == "constrained":
        plan = plan_of(constrained, 64, jax.random.key(0))
    elif batch == "rows":
        step = lambda w, x: (w, lax.map(lambda r: jnp.tanh(r @ w).sum(), x))  # noqa: E731
        plan = plan_of(step, 63, jnp.ones((16, 63)))
    else:
        plan = plan_of(lambda w, x: (trained(w, x), 0.0), 64, jnp.ones((64, 64)))
        assert plan.work.flops == 2 * 2 * 64**3 // 8
    assert plan.work.replicated == 0 and plan.work.flops
    assert "FLOPs" not in str(plan)


def test_much_of_it_is_warned_of() -> None:
    with pytest.warns(
        ReplicatedComputeWarning,
        match=r"100% of a device's FLOPs are the same on every device: 4\.3e\+09 per "
        r"step, most of them\n  at test_replicated\.py:\d+ .*\nNothing in them is sp",
    ):
        plan_of(simulated(1024), 1024, jax.random.key(0))
