"""In: steps that `jax.pmap` has wrapped. Out: the same as from the step in it, or what
it was told that a sharded step cannot do.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardfn

AXIS = "batch"
W = jnp.asarray(np.random.default_rng(0).integers(-2, 3, (12, 5)), jnp.float32)
X = jnp.asarray(np.random.default_rng(1).integers(-2, 3, (8, 12)), jnp.float32)


def step(w, x, scale):
    grad = jax.grad(lambda w: jnp.mean(jnp.sum((x @ w) ** 2, -1)))(w)
    return w - scale * lax.pmean(grad, AXIS), {"rows": x.sum(1)}


def sharded(fn: Any, **options: Any) -> shardfn.ShardedStep:
    mesh = jax.make_mesh((4,), (AXIS,), devices=jax.devices()[:4])
    options = {"axis": AXIS, "min_size": 8, "donate": False} | options
    return shardfn.fully_shard(fn, mesh, **options)


@pytest.mark.parametrize(
    "told",
    [
        {"in_axes": (None, 0, None)},
        {"in_axes": 0, "donate_argnums": (0,)},
        {"in_axes": (0, {"x": 0, "scale": None})},
    ],
    ids=["in_axes", "donate", "tree"],
)
def test_a_step_in_pmap_is_the_step(told: dict[str, Any]) -> None:
    wrapped, args = step, (X, jnp.float32(0.25))
    if isinstance(told["in_axes"], tuple) and len(told["in_axes"]) == 2:
        args = ({"x": X, "scale": jnp.full((1,), 0.25)},)

        def wrapped(w, batch):
            assert batch["scale"].shape == (1,)
            return step(w, **batch)

    run = sharded(jax.pmap(wrapped, axis_name=AXIS, **told))
    state, metrics = run(W, *args)
    expected, its = sharded(step)(W, X, jnp.float32(0.25))
    np.testing.assert_array_equal(run.unshard(state), run.unshard(expected))
    np.testing.assert_array_equal(metrics["rows"], its["rows"])
    assert run.__wrapped__ is wrapped


def test_in_axes_of_other_dimensions() -> None:
    transposed = jax.pmap(
        lambda w, x, scale: step(w, x.T, scale), axis_name=AXIS, in_axes=(None, 1, None)
    )
    state, _ = sharded(transposed)(W, X.T, jnp.float32(0.25))
    expected, _ = sharded(step)(W, X, jnp.float32(0.25))
    np.testing.assert_array_equal(state, expected)


def test_the_callers_batch_spec_counts() -> None:
    wrapped = jax.pmap(step, axis_name=AXIS, in_axes=(None, 0, None))
    _, metrics = sharded(wrapped, batch_spec=(P(), P()))(W, X, jnp.float32(0.25))
    np.testing.assert_array_equal(metrics["rows"], X.sum(1))


@pytest.mark.parametrize(
    "told, message",
    [
        ({}, r"jax.pmap of step names no axis, so each device would train alone\."),
        (
            {"axis_name": "i"},
            r"jax.pmap of step has axis_name='i', but fully_shard shards over "
            r"\('batch',\)\.",
        ),
        (
            {"axis_name": AXIS, "static_broadcasted_argnums": (2,)},
            r"jax.pmap of step has static_broadcasted_argnums=2, which a sharded step "
            r"does not take\.",
        ),
    ],
)
def test_what_pmap_was_told_in_vain(told: dict[str, Any], message: str) -> None:
    wrapped = functools.partial(jax.pmap, **told)(step)
    with pytest.raises(shardfn.ShardingError, match=f"^{message}\n.*test_pmapped.py"):
        sharded(wrapped)
