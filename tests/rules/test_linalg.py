"""Rules of matrix decompositions, solves and Fourier transforms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import assert_every_factor_matches_unsharded, equation_of, integers
from jax import lax
from plan_helpers import cpu_mesh
from table import Row, table

import shardfn
from shardfn._core.compat import primitives
from shardfn._core.rule_registry import rule_of

MATRICES = integers((5, 3, 3)) + 4 * np.eye(3, dtype=np.float32)
POSITIVE = (MATRICES @ MATRICES.transpose(0, 2, 1)).astype(np.float32)
TALL = integers((5, 4, 3))


def solve(left):
    return lambda a, b: lax.linalg.triangular_solve(a, b, left_side=left)


DECOMPOSITIONS = [
    (lax.linalg.cholesky, POSITIVE, "cholesky"),
    (lax.linalg.lu, MATRICES, "lu"),
    (lax.linalg.qr, TALL, "qr"),
    (lax.linalg.svd, TALL, "svd"),
    (lax.linalg.eigh, POSITIVE, "eigh"),
    (lax.linalg.tridiagonal, POSITIVE, "tridiagonal"),
    (lax.linalg.schur, MATRICES, "schur"),
    (lax.linalg.hessenberg, MATRICES, "hessenberg"),
]


@pytest.mark.parametrize("fn, matrices, name", DECOMPOSITIONS)
def test_a_decomposition_maps_its_stack(fn, matrices, name):
    eqn, values = equation_of(fn, matrices, name=name)
    rule = rule_of(eqn)
    assert rule.is_splittable("a")
    assert rule.whole == {name for name, _ in rule.sizes} - {"a"}
    assert not rule.linear
    assert_every_factor_matches_unsharded(eqn, values, rtol=1e-5)


@table(
    Row(
        solve(True),
        (MATRICES, (5, 3, 6)),
        "a b c, a d e -> a d e  whole={b, c, d}",
        ({1},),
        name="triangular_solve",
        rtol=1e-4,
    ),
    Row(
        solve(False),
        (MATRICES, (5, 6, 3)),
        "a b c, a d e -> a d e  whole={b, c, e}",
        ({1},),
        name="triangular_solve",
        rtol=1e-4,
    ),
    Row(
        lax.linalg.tridiagonal_solve,
        ((5, 3), np.full((5, 3), 9, np.float32), (5, 3), (5, 3, 6)),
        "a b, a c, a d, a e f -> a e f  whole={b, c, d, e}",
        ({3},),
        rtol=1e-4,
    ),
    Row(
        lambda x: lax.fft(x, "fft", (8,)),
        ((5, 8),),
        "a b -> a c  whole={b, c}",
        uncounted=(0,),
        name="fft",
        rtol=1e-4,
    ),
    Row(
        lambda x: lax.fft(x, "rfft", (4, 8)),
        ((5, 4, 8),),
        "a b c -> a d e  whole={b, c, d, e}",
        uncounted=(0,),
        name="fft",
        rtol=1e-4,
    ),
)
def test_linear_solve_rule(row):
    row.check()


def test_pivots_map_their_stack():
    pivots = jnp.asarray([[1, 2, 2]] * 5, jnp.int32)
    eqn, values = equation_of(
        lambda p: lax.linalg.lu_pivots_to_permutation(p, 3), pivots
    )
    assert str(rule_of(eqn)) == "a b -> a c  whole={b, c}"
    assert_every_factor_matches_unsharded(eqn, values)


def test_householder_and_its_product_map_their_stack():
    a, taus = integers((5, 4, 3)), integers((5, 3)) / 8
    eqn, values = equation_of(
        lax.linalg.householder_product, a, taus.astype(np.float32)
    )
    assert str(rule_of(eqn)) == "a b c, a d -> a e f  whole={b, c, d, e, f}"
    assert_every_factor_matches_unsharded(eqn, values, rtol=1e-4)


@pytest.mark.parametrize("left, shape", [(True, (5, 4, 6)), (False, (5, 6, 4))])
def test_orthogonal_product_is_linear_in_its_columns(left, shape):
    ormqr = primitives("ormqr")[0]
    args = integers((5, 4, 3)) / 8, integers((5, 3)) / 8, integers(shape)
    args = [a.astype(np.float32) for a in args]
    eqn, values = equation_of(
        lambda a, t, c: ormqr.bind(a, t, c, left=left, transpose=False), *args
    )
    free = "f" if left else "e"
    rule = rule_of(eqn)
    assert rule.linear == (frozenset({2}),) and rule.is_splittable(free)
    assert_every_factor_matches_unsharded(eqn, values, rtol=1e-4)


def test_cholesky_update_is_whole():
    eqn, _ = equation_of(
        lax.linalg.cholesky_update, POSITIVE[0], np.ones(3, np.float32)
    )
    assert str(rule_of(eqn)) == "a b, c -> d e  whole={a, b, c, d, e}"


def test_eig_maps_its_stack():
    eqn, values = equation_of(
        lambda x: lax.linalg.eig(x)[0], jax.numpy.asarray(MATRICES), name="eig"
    )
    assert rule_of(eqn).is_splittable("a")
    assert_every_factor_matches_unsharded(eqn, values, rtol=1e-5)


def test_a_transformed_gradient_is_reduced_first():
    """XLA:CPU cannot run a transform whose result is reduce-scattered transposed."""

    def step(w, x):
        grad = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        smooth = jnp.fft.irfft(jnp.fft.rfft(grad, axis=0) * 0.5, n=16, axis=0)
        return w - 0.1 * smooth, {}

    w, x = jnp.asarray(integers((16, 8))), jnp.asarray(integers((16, 16)))
    sharded = shardfn.fully_shard(step, cpu_mesh(8), min_size=8, donate=False)
    np.testing.assert_allclose(sharded(w, x)[0], step(w, x)[0], rtol=1e-5, atol=1e-4)
