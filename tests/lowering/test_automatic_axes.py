"""In: steps on CPU devices beside a mesh axis that is left to the compiler, where it
ends the process over sums of bfloat16, and where JAX makes no callbacks. Out: the plain
step's results; such sums are float32, and the plan says so.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import shardfn

BF16 = jnp.bfloat16
Array = jax.Array


def mesh(sizes: tuple[int, int] = (4, 2)) -> jax.sharding.Mesh:
    devices = jax.devices()[: sizes[0] * sizes[1]]
    kinds = (AxisType.Auto, AxisType.Auto)
    return jax.make_mesh(sizes, ("data", "model"), kinds, devices=devices)


def integers(shape: tuple[int, ...], seed: int) -> Array:
    """Small integers: their sums are exact in bfloat16."""
    values = np.random.default_rng(seed).integers(-1, 2, shape)
    return jnp.asarray(values, jnp.float32)


W, X = integers((16, 6), 0), integers((16, 16), 1)


def gradients(w: Array, x: Array) -> Array:
    return jax.grad(lambda w: jnp.sum((x.astype(BF16) @ w.astype(BF16))[:, :3]))(w)


def sums_in_scan(w: Array, x: Array) -> Array:
    start = jnp.ones(16, BF16)
    return lax.scan(lambda a, row: (a + row.astype(BF16), None), start, x)[0]


def sums_in_while(w: Array, x: Array) -> Array:
    def add(i: Array, total: Array) -> Array:
        return total + (x[i].astype(BF16) * x.astype(BF16)).sum(0)

    return lax.fori_loop(0, 3, add, jnp.zeros(16, BF16))


def sums_in_cond(w: Array, x: Array) -> Array:
    y = x.astype(BF16)
    return lax.cond(x[0, 0] > 0, lambda: y.sum(0), lambda: (y * y).sum(0))


METRICS = {
    "sum": lambda w, x: jnp.sum(x.astype(BF16), 0),
    "matmul": lambda w, x: x.astype(BF16).T @ x.astype(BF16),
    "row": lambda w, x: x.astype(BF16)[3],
    "lookup": lambda w, x: w.astype(BF16)[jnp.array([3])],
    "max": lambda w, x: jnp.max(x.astype(BF16), 0),
    "prod": lambda w, x: jnp.prod(x.astype(BF16), 0),
    "scan": sums_in_scan,
    "while": sums_in_while,
    "cond": sums_in_cond,
    "remat": lambda w, x: jax.checkpoint(lambda y: y.sum(0))(x.astype(BF16)),
    "gradients": gradients,
}
"""Each sums over the batch or over shards, in another kind of program."""


def every(w: Array, x: Array) -> tuple[Array, dict[str, Array]]:
    return w, {name: metric(w, x) for name, metric in METRICS.items()}


@pytest.mark.parametrize("sizes", [(4, 2), (4, 1)], ids=["4x2", "4x1"])
@pytest.mark.parametrize("reduce_dtype", [None, "bfloat16"])
def test_sums_of_bfloat16(sizes: tuple[int, int], reduce_dtype: Any) -> None:
    """An axis of one device ends the process too."""
    run = shardfn.fully_shard(every, mesh(sizes), min_size=8, reduce_dtype=reduce_dtype)
    _, metrics = run(W, X)
    for name, want in jax.jit(every)(W, X)[1].items():
        np.testing.assert_array_equal(metrics[name], want, err_msg=name)
        assert metrics[name].dtype == want.dtype
    sums = [c for c in run.plan(W, X).collectives if c.op in SUMS]
    assert sums and "bfloat16" not in {c.dtype for c in sums}


SUMS = ("all_reduce", "psum_scatter")


def test_sums_stay_bfloat16_where_every_axis_is_manual() -> None:
    alone = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    plan = shardfn.fully_shard(every, alone, min_size=8).plan(W, X)
    assert "bfloat16" in {c.dtype for c in plan.collectives if c.op in SUMS}


@pytest.mark.parametrize("reduce", [jnp.sum, jnp.max], ids=["sum", "max"])
def test_gradients_from_outside(reduce: Any) -> None:
    """JAX transposes what makes a value vary over devices into a sum over them."""

    def step(w: Array, x: Array) -> tuple[Array, Array]:
        y = reduce(x.astype(BF16) @ w.astype(BF16), 0) * w.astype(BF16)[0]
        return w, jnp.sum(y.astype(jnp.float32))

    run = shardfn.fully_shard(step, mesh(), min_size=8, donate=False)
    found = jax.grad(lambda w: run(w, X)[1])(W)
    expected = jax.grad(lambda w: step(w, X)[1])(W)
    np.testing.assert_allclose(found, expected, rtol=2e-2)  # thirds, for three tied


def test_sums_of_bfloat16_in_the_callers_shard_map() -> None:
    run = shardfn.fully_shard(lambda w, x: (w, METRICS["sum"](w, x)), min_size=8)
    over = jax.shard_map(
        lambda w, x: run(run.shard(w), x)[1],
        mesh=mesh(),
        in_specs=(P(), P("data")),
        out_specs=P(),
        axis_names={"data"},
    )
    np.testing.assert_array_equal(jax.jit(over)(W, X), METRICS["sum"](W, X))


@pytest.mark.filterwarnings("ignore::shardfn.UnsupportedPrimitiveWarning")
def test_pure_callbacks() -> None:
    def step(w: Array, x: Array) -> tuple[Array, Array]:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        y = jax.pure_callback(lambda a: np.asarray(a) ** 2, shape, x @ w @ w.T)
        jax.debug.print("mean {}", x.mean())
        return w, y.sum(0)

    run = shardfn.fully_shard(step, mesh(), min_size=8)
    np.testing.assert_array_equal(run(W, X)[1], jax.jit(step)(W, X)[1])
