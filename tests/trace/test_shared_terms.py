"""In: per-device steps that average terms of which some are the same on all devices.
Out: these are added behind the sum: what moves is what moves without them.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardfn

Array = jax.Array
AXIS = "batch"
RNG = np.random.default_rng(0)
PARAMS = {
    "in": jnp.asarray(RNG.integers(-2, 3, (16, 12)), jnp.float32) / 4,
    "out": jnp.asarray(RNG.integers(-2, 3, (12, 9)), jnp.float32) / 4,
}
X = jnp.asarray(RNG.integers(-2, 3, (8, 16)), jnp.float32)


def squares(params: Any) -> Array:
    return sum((jnp.sum(w**2) for w in jax.tree.leaves(params)), jnp.zeros(()))


def sizes(params: Any) -> Array:
    return jnp.sum(jnp.abs(params["in"]))


PENALTIES: dict[str, Callable[[Any], Array]] = {
    "none": lambda params: jnp.zeros(()),
    "L2": lambda params: squares(params) / 64,
    "L1 and L2 of one leaf": lambda params: (
        sizes(params) / 8 + jnp.sum(params["in"] ** 2) / 16
    ),
    "between the layers": lambda params: jnp.sum(params["in"] @ params["out"]) / 8,
}


def per_device(penalty: str, mean: Any = lax.pmean) -> Callable[..., Any]:
    def step(params: Any, x: Array) -> tuple[Any, Any]:
        def loss_fn(params: Any) -> Array:
            y = (x @ params["in"]) @ params["out"]
            return jnp.mean(jnp.sum(y * y, 1)) / 16 + PENALTIES[penalty](params)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        new = jax.tree.map(lambda w, g: w - mean(g, AXIS) / 8, params, grads)
        return new, {"loss": mean(loss, AXIS)}

    return step


def sharded(step: Callable[..., Any]) -> shardfn.ShardedStep:
    mesh = jax.make_mesh((4,), (AXIS,), devices=jax.devices()[:4])
    return shardfn.fully_shard(step, mesh, axis=AXIS, min_size=8, donate=False)


def of_leaves(penalty: str) -> Counter[Any]:
    plan = sharded(per_device(penalty)).plan(PARAMS, X)
    return Counter((c.op, c.shape, c.wire_bytes) for c in plan.collectives if c.shape)


@pytest.mark.parametrize("penalty", ["L2", "L1 and L2 of one leaf"])
def test_a_penalty_moves_nothing(penalty: str) -> None:
    assert of_leaves(penalty) == of_leaves("none")


@pytest.mark.covering(1)
@pytest.mark.parametrize("mean", [lax.pmean, lax.psum], ids=["pmean", "psum"])
@pytest.mark.parametrize("penalty", [p for p in PENALTIES if p != "none"])
def test_a_penalty_counts_as_under_pmap(penalty: str, mean: Any) -> None:
    step = per_device(penalty, mean)
    run = sharded(step)
    under_pmap = jax.pmap(
        step, axis_name=AXIS, in_axes=(None, 0), devices=jax.devices()[:4]
    )
    state, expected = run.shard(PARAMS), PARAMS
    for _ in range(2):
        state, metrics = run(state, X)
        stacked, its = under_pmap(expected, X.reshape(4, 2, 16))
        expected = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[0]), stacked)
        for got, want in zip(
            jax.tree.leaves((run.unshard(state), metrics["loss"])),
            jax.tree.leaves((expected, its["loss"][0])),
            strict=True,
        ):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
