"""In: decompositions of stacks of matrices. Out: FLOPs as in the textbook, and those of
a step on one device.
"""

import jax
import jax.numpy as jnp
import pytest

import shardfn
from shardfn._core.decomposition_flops import decomposition_flops

STACK, M, N = 5, 12, 9


def found(fn, *shape: int, dtype=jnp.float32) -> int:
    """Of all equations, those in functions that JAX has compiled apart, too."""

    def count(jaxpr) -> int:
        inner = jax.extend.core.jaxprs_in_params
        return sum(
            decomposition_flops(eqn)
            + sum(count(getattr(j, "jaxpr", j)) for j in inner(eqn.params))
            for eqn in jaxpr.eqns
        )

    return count(jax.make_jaxpr(fn)(jax.ShapeDtypeStruct(shape, dtype)).jaxpr)


def thin_svd(x):
    return jnp.linalg.svd(x, full_matrices=False)


@pytest.mark.parametrize(
    "fn, shape, each",
    [
        (jax.lax.linalg.cholesky, (N, N), N**3 // 3),
        (jax.lax.linalg.lu, (N, N), 2 * N**3 // 3),
        (jax.lax.linalg.eigh, (N, N), 9 * N**3),
        (jax.lax.linalg.eig, (N, N), 25 * N**3),
        (thin_svd, (M, N), 6 * M * N**2 + 20 * N**3),
        (thin_svd, (N, M), 6 * M * N**2 + 20 * N**3),
        (jnp.linalg.svd, (M, N), 4 * M**2 * N + 22 * N**3),
        (jnp.linalg.svdvals, (M, N), 2 * M * N**2 + 2 * N**3),
        (jnp.linalg.qr, (M, N), 4 * N**2 * M - 4 * N**3 // 3),
        (jnp.tanh, (M, N), 0),
    ],
)
def test_flops_of_decompositions(fn, shape, each) -> None:
    assert found(fn, STACK, *shape) == STACK * each


def test_complex_numbers_take_four_times_as_many() -> None:
    real = found(jax.lax.linalg.eigh, N, N)
    assert found(jax.lax.linalg.eigh, N, N, dtype=jnp.complex64) == 4 * real


def test_solves_count_by_their_columns() -> None:
    def solve(x):
        return jax.lax.linalg.triangular_solve(x[:, :N], x[:, N:], left_side=True)

    assert found(solve, N, N + 4) == N**2 * 4


def test_a_decomposition_that_every_device_repeats_is_named() -> None:
    """Of one matrix nothing can be split."""

    def train_step(w, x):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        u, _, v = jnp.linalg.svd(grad, full_matrices=False)
        return w - 1e-2 * u @ v, loss

    step = shardfn.fully_shard(train_step, jax.make_mesh((8,), ("data",)), min_size=0)
    work = step.plan(jnp.ones((64, 64)), jnp.ones((64, 64))).work
    assert work.replicated >= 26 * 64**3
    assert "test_decomposition_flops.py" in work.place
