"""In: steps with prefix sums, products and extrema over rows of the batch. Out: the
plain step's values and gradients, for which each device sends one row per device.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from plan_helpers import cpu_mesh

import shardfn

pytestmark = pytest.mark.standard_promotion

ROWS, COLUMNS = 48, 3


def weighted(x: jax.Array) -> jax.Array:
    return (jnp.cumsum(x, 0) * (1 + jnp.arange(ROWS)[:, None] % 5)).sum()


def positions(x: jax.Array) -> jax.Array:
    """Where each row stands among those of its kind, as routing asks."""
    kinds = jax.nn.one_hot(x[:, 0].astype(jnp.int32) % 4, 4, dtype=jnp.int32)
    return (jnp.cumsum(kinds, 0) * kinds).sum(1) - 1


def step(state: Any, x: jax.Array) -> Any:
    signs = jnp.where(x > 0, 1.0, -1.0)
    return state, {
        "sum": jnp.cumsum(x, 0),
        "reverse": lax.cumsum(x, 0, reverse=True),
        "product": jnp.cumprod(signs, 0),
        "max": lax.cummax(x, 0),
        "min": lax.cummin(x.astype(jnp.int8), 0, reverse=True),
        "columns": jnp.cumsum(x, 1),
        "both": jnp.cumsum(jnp.cumsum(x, 0), 1),
        "turned": jnp.cumsum(x.T, 1),
        "positions": positions(x),
        "gradient": jax.grad(weighted)(x),
        "remat": jax.grad(jax.checkpoint(weighted))(x),
        "loop": lax.scan(lambda s, _: (jnp.cumsum(s, 0), s[-1]), x, None, 2),
        "blocks": jnp.cumsum(x.reshape(ROWS // 2, 2, COLUMNS), 1),
        "fewer": jnp.cumsum(x[1:], 0),
    }


@pytest.mark.parametrize("sizes", [(8,), (2, 4), (3,), (1,)], ids=str)
def test_prefixes_are_those_of_the_plain_step(sizes: tuple[int, ...], integers) -> None:
    mesh, x = cpu_mesh(*sizes), integers((ROWS, COLUMNS))
    sharded = shardfn.fully_shard(step, mesh, axis=mesh.axis_names, donate=False)
    args = jnp.float32(0), x
    expected, got = jax.jit(step)(*args), jax.device_get(sharded(*args))
    jax.tree.map(np.testing.assert_array_equal, expected, got)


def test_logarithms_of_sums_are_near(integers) -> None:
    def step(state: Any, x: jax.Array) -> Any:
        far = x.at[0].set(-jnp.inf)
        return state, [lax.cumlogsumexp(x, 0), lax.cumlogsumexp(far, 0)]

    args = jnp.float32(0), integers((ROWS, COLUMNS)) / 8
    expected = jax.jit(step)(*args)
    got = shardfn.fully_shard(step, cpu_mesh(8), donate=False)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-6), expected, got)


def turned(x: jax.Array) -> jax.Array:
    """Complex numbers in different directions."""
    return lax.complex(x, jnp.roll(x, 1)) / 4


@pytest.mark.parametrize("reverse", [False, True])
def test_prefixes_of_complex_numbers(reverse: bool, integers) -> None:
    """Their extrema are those of real parts, then of imaginary ones: devices combine
    none."""

    def step(state: Any, x: jax.Array) -> Any:
        z = turned(x)
        each = lax.cummax, lax.cummin, lax.cumlogsumexp, lax.cumsum, lax.cumprod
        return state, [make(z, 0, reverse) for make in each]

    args = jnp.float32(0), integers((ROWS, COLUMNS)) / 8
    expected = jax.jit(step)(*args)
    got = shardfn.fully_shard(step, cpu_mesh(8), donate=False)(*args)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), expected, got
    )


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float16])
def test_extrema_of_floats_without_an_infinity(dtype: Any, integers) -> None:
    """Over some rows, and over rows that devices do not divide."""

    def step(state: Any, x: jax.Array) -> Any:
        y = x.astype(dtype)
        cut = y[: ROWS - 5]
        found = lax.cummax(y, 0), lax.cummin(y, 0), y.max(0), cut.max(0), cut.min(0)
        return state, [z.astype(jnp.float32) for z in found]

    args = jnp.float32(0), integers((ROWS, COLUMNS))
    expected = jax.jit(step)(*args)
    got = shardfn.fully_shard(step, cpu_mesh(8), donate=False)(*args)
    jax.tree.map(np.testing.assert_array_equal, expected, got)


@pytest.mark.parametrize(
    "fn, times",
    [
        (lambda x: jnp.cumsum(x, 0), 1),
        (lambda x: lax.cummax(x, 0, reverse=True), 1),
        (jax.grad(lambda x: (jnp.cumsum(x, 0) ** 2).sum()), 2),
    ],
    ids=["sum", "max", "gradient"],
)
def test_devices_send_one_row_each(fn: Any, times: int) -> None:
    """To all others, and that of the blocks before one once more, to the next."""
    n = 8
    sharded = shardfn.fully_shard(lambda s, x: (s, fn(x)), cpu_mesh(n))
    args = jnp.float32(0), jnp.ones((ROWS, COLUMNS))
    plan = sharded.plan(*args)
    row = COLUMNS * 4
    assert (n - 1) * row * times <= plan.wire_bytes <= n * row * times
    assert plan.verify(sharded.lower(*args).compile()).ok
