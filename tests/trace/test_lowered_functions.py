"""In: primitives of libraries whose lowering JAX traces from a function. Out: they are
written out in the program that is planned, as their function saw it there.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

import shardfn


def checked(name: str, several: bool) -> Primitive:
    """Reverses rows; like a solver of lineax it carries the structure that its operand
    had where it was called, and compares it where it runs."""
    primitive = Primitive(name)
    primitive.multiple_results = several

    def run(x: jax.Array, *, structure: jax.ShapeDtypeStruct) -> Any:
        if jax.eval_shape(lambda: x) != structure:
            raise ValueError("pytree does not match out_structure")
        return [jnp.flip(x, 1)] * 2 if several else jnp.flip(x, 1)

    primitive.def_impl(run)
    primitive.def_abstract_eval(lambda x, structure: [x, x] if several else x)
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=several))
    return primitive


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("in_loop", [False, True])
def test_a_structure_that_is_compared_where_it_runs(
    several: bool, in_loop: bool
) -> None:
    primitive = checked("checked", several)

    def reversed_rows(x: jax.Array) -> jax.Array:
        out = primitive.bind(x, structure=jax.eval_shape(lambda: x))
        return out[0] if several else out

    def step(w, x):
        y = x @ w
        if in_loop:
            y = jax.lax.fori_loop(0, 3, lambda _, y: reversed_rows(y), y)
        else:
            y = reversed_rows(y)
        return w + y.mean(0), y

    w, x = jnp.arange(256.0).reshape(16, 16), jnp.ones((16, 16)).at[3].set(2.0)
    sharded = shardfn.fully_shard(step, jax.make_mesh((8,), ("data",)), min_size=8)
    new, y = sharded(w, x)
    expected = jax.jit(step)(w, x)
    np.testing.assert_allclose(new, expected[0], rtol=1e-6)
    np.testing.assert_allclose(y, expected[1], rtol=1e-6)
    assert not sharded.plan(w, x).fallbacks


def test_one_that_cannot_be_written_out_runs_gathered() -> None:
    """Its lowering is no traced function, or one that fails without its mesh."""
    made = Primitive("by_hand")
    made.def_abstract_eval(lambda x: x)
    flip = mlir.lower_fun(lambda x: jnp.flip(x, 1), multiple_results=False)
    mlir.register_lowering(made, lambda context, x: flip(context, x))
    w, x = jnp.arange(256.0).reshape(16, 16), jnp.ones((8, 2))
    sharded = shardfn.fully_shard(
        lambda w, x: (made.bind(w), x.sum()), jax.make_mesh((8,), ("data",)), min_size=8
    )
    with pytest.warns(shardfn.UnsupportedPrimitiveWarning, match="'by_hand'"):
        new, _ = sharded(w, x)
    np.testing.assert_array_equal(new, w[:, ::-1])


def test_linear_solves_of_lineax() -> None:
    """Implicit solvers of diffrax, such as Kvaerno3, are made of them."""
    lineax = pytest.importorskip("lineax")

    def solve(w, y):
        return lineax.linear_solve(lineax.MatrixLinearOperator(w), y).value

    def loss_fn(w, x):
        return jnp.mean(jax.vmap(lambda y: solve(w, y))(x) ** 2)

    def step(w, x):
        loss, grad = jax.value_and_grad(loss_fn)(w, x)
        return w - grad / 8, loss

    w = 4 * jnp.eye(8) + jax.random.normal(jax.random.key(0), (8, 8)) / 4
    x = jax.random.normal(jax.random.key(1), (16, 8))
    sharded = shardfn.fully_shard(step, jax.make_mesh((8,), ("data",)), min_size=8)
    with jax.numpy_dtype_promotion("standard"):
        expected, got = jax.jit(step)(w, x), sharded(w, x)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
