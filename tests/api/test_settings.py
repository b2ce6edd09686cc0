"""In: a training step under each of JAX's settings for debugging and for numbers. Out:
what the plain step gives under the same setting, or the error that it raises.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from tiers import tiered

import shardfn

SETTINGS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "jax_numpy_rank_promotion": lambda: jax.numpy_rank_promotion("raise"),
    "jax_numpy_dtype_promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "jax_check_tracer_leaks": jax.checking_leaks,
    "jax_debug_nans": lambda: jax.debug_nans(True),
    "jax_debug_infs": lambda: jax.debug_infs(True),
    "jax_debug_key_reuse": lambda: jax.debug_key_reuse(True),
    "jax_log_compiles": jax.log_compiles,
    "jax_explain_cache_misses": lambda: jax.explain_cache_misses(True),
    "jax_disable_jit": jax.disable_jit,
    "jax_enable_checks": lambda: jax.enable_checks(True),
    "jax_enable_custom_prng": lambda: jax.enable_custom_prng(True),
    "jax_default_prng_impl": lambda: jax.default_prng_impl("rbg"),
    "jax_threefry_partitionable": lambda: jax.threefry_partitionable(False),
    "jax_default_matmul_precision": lambda: jax.default_matmul_precision("highest"),
    "jax_transfer_guard": lambda: jax.transfer_guard("disallow"),
    "jax_array_garbage_collection_guard": lambda: jax.array_garbage_collection_guard(
        "log"
    ),
    "jax_enable_x64": lambda: jax.enable_x64(True),
}


def create(scale: Any) -> dict[str, jax.Array]:
    """Odd sizes: some leaves are padded, some flattened."""

    def leaf(*shape: int) -> jax.Array:
        values = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
        return jnp.sin(values) * scale

    return {
        "table": leaf(21, 5),
        "kernel": leaf(5, 8),
        "bias": leaf(8),
        "layers": leaf(3, 8, 8),
    }


def loss_fn(params: Any, batch: Any) -> jax.Array:
    x = params["table"][batch["ids"]] + batch["x"]
    h = x @ params["kernel"] + params["bias"][None]

    @jax.checkpoint
    def layer(h: jax.Array, kernel: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(h @ kernel), None

    h, _ = lax.scan(layer, h, params["layers"])
    return jnp.mean(jax.nn.logsumexp(h, 1)) + jnp.sum(jnp.max(h, 0))


def step(params: Any, batch: Any) -> tuple[Any, Any]:
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    new = jax.tree.map(lambda p, g: p - g / jnp.maximum(norm, 1.0), params, grads)
    noise = jax.random.normal(jax.random.key(0), (8,), jnp.float32)
    return new, {"loss": loss, "rows": batch["x"][:, 0] + noise}


def arguments() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 5)).astype(np.float32)
    ids = rng.integers(0, 21, 8).astype(np.int32)
    return jnp.float32(0.3), {"x": jnp.asarray(x), "ids": jnp.asarray(ids)}


@functools.cache
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])


# Each is like another, which the quick run has.
ALIKE = {
    "jax_debug_infs",
    "jax_log_compiles",
    "jax_explain_cache_misses",
    "jax_array_garbage_collection_guard",
}


@pytest.mark.parametrize("setting", tiered(SETTINGS, SETTINGS.keys() - ALIKE))
def test_a_setting_changes_a_step_as_it_changes_the_plain_one(setting: str) -> None:
    scale, batch = arguments()
    with SETTINGS[setting]():
        # Not all settings are in the key of the cache of `jax.jit`.
        plain = jax.jit(lambda scale: create(scale))(scale)
        expected = jax.jit(lambda *args: step(*args))(plain, batch)
        run = shardfn.fully_shard(step, mesh(), min_size=8)
        state = run.init(create, scale)
        born = run.unshard(state)
        state, metrics = run(state, batch)
        out = run.unshard(state), metrics
        assert run.plan(state, batch).collectives
    for got, want in zip(
        jax.tree.leaves((born, out)), jax.tree.leaves((plain, expected)), strict=True
    ):
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def unhealthy(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.log(x @ w)))(w)
    return w - grad, loss


@pytest.mark.covering(1)
@pytest.mark.parametrize("is_warm", [False, True], ids=["first call", "later call"])
@pytest.mark.parametrize(
    "setting, sign", [("jax_debug_nans", -1), ("jax_debug_infs", 0)]
)
def test_an_unhealthy_number_is_an_error_and_the_state_stays(
    setting: str, sign: int, is_warm: bool
) -> None:
    """Donated, the state would be gone when JAX runs the step again to find where."""
    run = shardfn.fully_shard(unhealthy, mesh(), min_size=8)
    state, x = run.shard(jnp.ones((8, 8))), jnp.ones((8, 8))
    if is_warm:
        state, _ = run(state, x)
    with SETTINGS[setting](), pytest.raises(FloatingPointError):
        jax.jit(unhealthy)(jnp.ones((8, 8)), sign * x)
    with SETTINGS[setting](), pytest.raises(FloatingPointError, match="nan|inf"):
        run(state, sign * x)
    np.testing.assert_array_equal(run.unshard(state), 0.984375 if is_warm else 1)
    run(state, x)
    with pytest.raises(shardfn.ShardingError, match="was donated to an earlier call"):
        run(state, x)


@pytest.mark.parametrize("value", [jnp.float32, lambda x: jax.random.key(3)])
def test_a_scalar_on_one_device_is_moved_though_transfers_are_guarded(value) -> None:
    """The plain step, on one device, has nothing to move."""

    def plain(w: jax.Array, scalar: jax.Array) -> tuple[jax.Array, jax.Array]:
        if scalar.dtype == jnp.float32:
            return w * scalar, scalar
        return w * jax.random.uniform(scalar), w.sum()

    step = shardfn.fully_shard(plain, jax.make_mesh((8,), ("data",)), min_size=0)
    first, w = step.shard(jnp.arange(9.0)), jnp.arange(9.0)
    for _ in range(2):
        scalar = jax.block_until_ready(value(0.5))
        expected = jax.jit(plain)(w, scalar)
        with jax.transfer_guard("disallow"):
            got = step(first, scalar)
        first, w = got[0], expected[0]
        np.testing.assert_allclose(step.unshard(first), w, rtol=1e-6)
        np.testing.assert_allclose(got[1], expected[1], rtol=1e-6)


def test_rows_of_a_padded_leaf_are_looked_up_without_rank_promotion() -> None:
    """Indices `[.., 1]` are clipped to ends `[1]` inside."""
    run = shardfn.fully_shard(lambda w, x: (w, w[jnp.array([1])]), mesh(), min_size=8)
    w, x = jnp.arange(128.0).reshape(16, 8), jnp.ones((8, 4))
    with jax.numpy_rank_promotion("raise"):
        row = run(w, x)[1]
    np.testing.assert_array_equal(row, w[1:2])


def test_a_setting_that_forbids_the_step_forbids_it_sharded() -> None:
    run = shardfn.fully_shard(lambda w, x: (w, (x + w[0]).sum()), mesh(), min_size=8)
    w, x = jnp.ones((16, 8)), jnp.ones((8, 8))
    with (
        jax.numpy_rank_promotion("raise"),
        pytest.raises(ValueError, match="could not be broadcast"),
    ):
        run(w, x)


def test_a_wire_dtype_that_jax_does_not_have() -> None:
    w, x = jnp.ones((16, 8)), jnp.ones((8, 16))

    def train(w, x):
        return w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), {}

    for option in ("reduce_dtype", "gather_dtype"):
        options: Any = {option: "float64"}
        run = shardfn.fully_shard(train, mesh(), min_size=8, donate=False, **options)
        with pytest.raises(
            shardfn.ShardingError,
            match=rf"^{option}='float64' names a dtype that JAX does not have while "
            r"jax_enable_x64 is off\.\n(.*\n)*Turn it on, jax.config.update\("
            r'"jax_enable_x64", True\), or name \'float32\'\.',
        ):
            run(w, x)
        with jax.enable_x64(True):
            run(w, x)
