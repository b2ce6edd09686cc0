"""In: pure steps that make arrays with `jax.new_ref` and change them in place. Out:
what `jax.jit` gives; a step that changes one from outside is refused.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardfn

Array = jax.Array
MESH = ((4,), ("data",))
W = jnp.asarray(np.random.default_rng(0).integers(-2, 3, (5, 8)), jnp.float32)
X = jnp.asarray(np.random.default_rng(1).integers(-2, 3, (8, 5)), jnp.float32)


def sharded(step, **options) -> shardfn.ShardedStep:
    mesh = jax.make_mesh(*MESH, devices=jax.devices()[:4])
    return shardfn.fully_shard(step, mesh, min_size=8, donate=False, **options)


def in_a_gradient(w: Array, x: Array) -> Array:
    def loss(w: Array) -> Array:
        hidden = jax.new_ref(jnp.zeros((8, 8)))
        hidden[...] = x @ w
        hidden[0:3] += 1.0
        return jnp.sum(hidden[...] ** 2)

    return jax.grad(loss)(w)


def in_scan(w: Array, x: Array) -> tuple[Array, Array]:
    total = jax.new_ref(jnp.zeros(8))

    def body(count: Array, row: Array) -> tuple[Array, Array]:
        total[...] += row @ w
        return count + 1, total[0]

    _, firsts = lax.scan(body, jnp.zeros(()), x)
    return jax.freeze(total), firsts


def in_fori_loop(w: Array, x: Array) -> Array:
    total = jax.new_ref(jnp.zeros(5))

    def body(i: Array, carry: Array) -> Array:
        total[...] += x[i]
        return carry

    lax.fori_loop(0, 8, body, jnp.zeros(()))
    return jax.freeze(total)


def in_cond(w: Array, x: Array) -> Array:
    ref = jax.new_ref(w)

    def change() -> None:
        ref[0] = x.sum(0)[:1] + jnp.zeros(8)

    lax.cond(x[0, 0] > -3, change, lambda: None)
    return ref[...]


def in_jit(w: Array, x: Array) -> Array:
    ref = jax.new_ref(jnp.zeros((8, 8)))

    @jax.jit
    def fill(ref: Array, x: Array) -> None:
        ref[...] = x @ w

    fill(ref, x)
    return ref[...]


def in_vmap(w: Array, x: Array) -> Array:
    def one(row: Array) -> Array:
        ref = jax.new_ref(row)
        ref[0] = jnp.float32(3)
        return ref[...]

    return jax.vmap(one)(x)


def in_remat(w: Array, x: Array) -> Array:
    @jax.checkpoint
    def loss(w: Array) -> Array:
        ref = jax.new_ref(x @ w)
        ref[...] *= 2.0
        return jnp.sum(ref[...])

    return jax.grad(loss)(w)


STEPS = [in_a_gradient, in_scan, in_fori_loop, in_cond, in_jit, in_vmap, in_remat]


def every(w: Array, x: Array) -> tuple[Array, dict[str, Array]]:
    out = {f.__name__: f(w, x) for f in STEPS}
    return w - out["in_a_gradient"], out


def test_a_ref_made_in_the_step() -> None:
    run = sharded(every)
    got, want = run(W, X), jax.jit(every)(W, X)
    np.testing.assert_array_equal(run.unshard(got[0]), want[0])
    for name, value in want[1].items():
        jax.tree.map(np.testing.assert_array_equal, got[1][name], value)


def test_a_ref_made_in_a_per_device_step() -> None:
    def step(w: Array, x: Array) -> tuple[Array, Array]:
        total = jax.new_ref(jnp.zeros(5))
        total[...] += x.sum(0)
        return w - lax.pmean(in_a_gradient(w, x[:1]), "data"), lax.psum(
            total[...], "data"
        )

    def in_a_gradient(w: Array, x: Array) -> Array:
        return jax.grad(lambda w: jnp.sum(x @ w))(w)

    _, total = sharded(step)(W, X)
    np.testing.assert_array_equal(total, X.sum(0))


def test_a_ref_from_outside_is_refused() -> None:
    outside = jax.new_ref(jnp.zeros(5))

    def step(w: Array, x: Array) -> tuple[Array, Array]:
        outside[...] += x.sum(0)
        return w, x.sum()

    with pytest.raises(shardfn.ShardingError, match="step is not pure: it has a side"):
        sharded(step)(W, X)
    np.testing.assert_array_equal(outside[...], 0)
