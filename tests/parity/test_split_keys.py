"""Arrays of PRNG keys whose rows devices split: each key comes to where the plain step
has it, whatever a step does with them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from sharded_and_plain import make_mesh

import shardfn

ROWS = 16
ORDER = np.random.default_rng(0).permutation(ROWS)

CHANGES: dict[str, Callable[[Array, Array], Array]] = {
    "update": lambda k, i: lax.dynamic_update_slice_in_dim(k, k[:4], i, 0),
    "update_moved": lambda k, i: lax.dynamic_update_slice_in_dim(k, k[:5], i + 13, 0),
    "update_of_two": lambda k, i: lax.dynamic_update_slice(
        jnp.stack([k, k], 1), k[:3, None], (i, 1)
    )[:, 1],
    "slice": lambda k, i: jnp.tile(lax.dynamic_slice_in_dim(k, i, 4), 4),
    "long_slice": lambda k, i: jnp.concatenate([k[3:], k[:3]]),
    "roll": lambda k, i: jnp.roll(k, i),
    "take": lambda k, i: k[ORDER],
    "one": lambda k, i: jnp.where(jnp.arange(ROWS) > 2, k, k[i]),
    "set": lambda k, i: k.at[i].set(jax.random.key(7, impl=jax.random.key_impl(k))),
    "put": lambda k, i: k.at[ORDER[:5]].set(k[:5], unique_indices=True),
    "scan": lambda k, i: lax.scan(lambda before, key: (key, before), k[i], k)[1],
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys_that_devices_split(change: str, impl: str) -> None:
    def step(w, x, keys, i):
        noise = jax.vmap(lambda k: jax.random.bits(k, (8,)))(CHANGES[change](keys, i))
        kept = jnp.where(x > 0, noise, 0)
        return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), kept

    w, x = jnp.ones((8, 8)), jnp.ones((ROWS, 8))
    keys = jax.random.split(jax.random.key(3, impl=impl), ROWS)
    sharded = shardfn.fully_shard(step, make_mesh("8"), min_size=0, donate=False)
    for i in (0, 3):
        args = w, x, keys, jnp.asarray(i)
        np.testing.assert_array_equal(sharded(*args)[1], jax.jit(step)(*args)[1])


KEY = jax.random.key(3)

NOISES: dict[str, Callable[[Array], Array]] = {
    "cond": lambda z: lax.cond(z.sum() > 0, jax.random.normal, _no_noise, KEY),
    "remat": lambda z: jax.checkpoint(lambda z: z[0] * jax.random.normal(KEY))(z),
    "scan": lambda z: lax.scan(_drawn, KEY, None, length=3)[1].sum(),
    "while": lambda z: lax.while_loop(_is_low, _drawn_on, (KEY, z[0, 0]))[1],
    "poisson": lambda z: jax.random.poisson(KEY, 3.0).astype(z.dtype),
}


def _no_noise(key: Array) -> Array:
    return jnp.zeros(())


def _drawn(key: Array, _: None) -> tuple[Array, Array]:
    return jax.random.split(key)[0], jax.random.normal(key)


def _is_low(carry: tuple[Array, Array]) -> Array:
    return carry[1] < 9


def _drawn_on(carry: tuple[Array, Array]) -> tuple[Array, Array]:
    return jax.random.split(carry[0])[0], carry[1] + jax.random.uniform(carry[0])


@pytest.mark.parametrize("noise", NOISES)
def test_a_key_that_a_step_has_from_outside(noise: str) -> None:
    def step(w, x):
        grad = jax.grad(lambda w: jnp.square(x @ w).mean())(w)
        return w - 0.1 * grad, NOISES[noise](x @ w)

    w, x = jnp.eye(8), jax.random.normal(jax.random.key(5), (ROWS, 8))
    mesh = jax.make_mesh((8,), ("data",))
    new, drawn = shardfn.fully_shard(step, mesh, min_size=0)(w, x)
    plain = jax.jit(step)(w, x)
    np.testing.assert_allclose(new, plain[0], rtol=1e-6)
    np.testing.assert_allclose(drawn, plain[1], rtol=1e-6)
