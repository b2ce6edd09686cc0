"""In: steps that use arrays which are no arguments of theirs: constants, and values
that their caller or a function with its own derivative has traced. Out: parity.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from plan_helpers import cpu_mesh

import shardfn

W = jnp.linspace(-1, 1, 64).reshape(8, 8)
X = jnp.linspace(-1, 1, 128).reshape(16, 8)
MASK = jnp.arange(8) % 2 == 0
CAPTURED = {
    "mask": MASK,
    "mask of nothing": MASK & ~MASK,
    "true": jnp.asarray(True),
    "count": jnp.arange(8),
    "small count": jnp.arange(8, dtype=jnp.uint8),
    "array of NumPy": np.arange(8.0, dtype=np.float32),
    "key": jax.random.key(3),
}


def use(w: jax.Array, x: jax.Array, captured: jax.Array) -> jax.Array:
    if jnp.issubdtype(captured.dtype, jax.dtypes.prng_key):
        return x @ w * jax.random.normal(captured, (8,))
    return jnp.where(captured > 3, jnp.tanh(x @ w), x)


def close_to(step: Callable, run: Callable) -> None:
    """`run(step)` gives what the plain step does."""
    expected, got = jax.jit(step)(W, X), run(step)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(a, jax.device_get(b), rtol=2e-5, atol=1e-6)


def sharded(step: Callable) -> Callable:
    return shardfn.fully_shard(step, cpu_mesh(8), min_size=0, donate=False)


def trained(fn: Callable) -> Callable:
    def step(w, x):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean(fn(w, x) ** 2))(w)
        return w - grad, loss

    return step


def test_constants_have_their_values() -> None:
    """Not planned before it is called: the plan is made while the call is traced."""

    def step(w, x):
        return w, {name: use(w, x, captured) for name, captured in CAPTURED.items()}

    with jax.numpy_dtype_promotion("standard"):
        close_to(step, lambda step: sharded(step)(W, X))


def test_values_of_the_callers_trace() -> None:
    def run(given: jax.Array, mask: jax.Array):
        def step(w, x):
            state, loss = trained(lambda w, x: use(w, x, mask) * given)(w, x)
            return state, loss + mask.sum()

        assert sharded(step).plan(W, X).collectives
        return sharded(step)(W, X)

    with jax.numpy_dtype_promotion("standard"):
        got = jax.jit(run)(jnp.float32(2), MASK)
        close_to(
            lambda w, x: (
                trained(lambda w, x: use(w, x, MASK) * 2)(w, x)[0],
                trained(lambda w, x: use(w, x, MASK) * 2)(w, x)[1] + 4,
            ),
            lambda _: got,
        )


def masked_vjp(w: jax.Array, x: jax.Array) -> jax.Array:
    """A function whose rule closes over what the step has traced."""
    mask = jnp.arange(8) % 2 == 0

    @jax.custom_vjp
    def fn(w, x):
        return jnp.where(mask, jnp.tanh(x @ w), x)

    fn.defvjp(
        lambda w, x: (fn(w, x), (w, x)),
        lambda saved, g: (saved[1].T @ (g * mask), (g * mask) @ saved[0].T),
    )
    return fn(w, x)


def masked_jvp(w: jax.Array, x: jax.Array) -> jax.Array:
    mask = jnp.arange(8) % 2 == 0

    @jax.custom_jvp
    def fn(w, x):
        return jnp.where(mask, jnp.tanh(x @ w), x)

    @fn.defjvp
    def derivative(primals, tangents):
        (w, x), (dw, dx) = primals, tangents
        return fn(w, x), jnp.where(mask, x @ dw + dx @ w, dx)

    return fn(w, x)


def solved(w: jax.Array, x: jax.Array) -> jax.Array:
    matrix = w.T @ w + 5 * jnp.eye(8)
    return lax.custom_linear_solve(
        lambda v: v @ matrix,
        x,
        lambda _, b: jnp.linalg.solve(matrix, b.T).T,
        symmetric=True,
    )


def root(w: jax.Array, x: jax.Array) -> jax.Array:
    def iterate(f, y):
        return lax.fori_loop(0, 9, lambda _, y: y - f(y), y)

    return lax.custom_root(
        lambda y: y - 0.1 * jnp.tanh(y @ w) - x,
        x,
        iterate,
        lambda g, y: iterate(lambda z: g(z) - y, y),
    )


RULES: dict[str, Callable] = {
    "vjp": masked_vjp,
    "jvp": masked_jvp,
    "in vmap": lambda w, x: jax.vmap(lambda r: masked_vjp(w, r[None]))(x)[:, 0],
    "linear solve": solved,
    "root": root,
}


@pytest.mark.parametrize("name", RULES)
def test_functions_with_their_own_derivative(name: str) -> None:
    with jax.numpy_dtype_promotion("standard"):
        close_to(trained(RULES[name]), lambda step: sharded(step)(W, X))
