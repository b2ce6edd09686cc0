"""In: steps that roll the rows of the batch by an amount that only the running step
knows. Out: the plain step's values and gradients, by permutes and no gather.
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

ROWS, COLUMNS = 24, 3


def paired(x: jax.Array, amount: jax.Array) -> jax.Array:
    return (x * jnp.roll(x, amount, 0) * (1 + jnp.arange(ROWS)[:, None] % 5)).sum()


def step(state: Any, x: jax.Array, amount: jax.Array) -> Any:
    def again(rows: jax.Array, k: jax.Array) -> Any:
        return jnp.roll(rows, k, 0), rows[0]

    return state, {
        "rows": jnp.roll(x, amount, 0),
        "both": jnp.roll(x, (amount, 1), (0, 1)),
        "columns": jnp.roll(x, amount, 1),
        "window": lax.dynamic_slice_in_dim(jnp.concatenate([x, x]), amount, ROWS),
        "bytes": jnp.roll(x.astype(jnp.int8), amount.astype(jnp.uint8), 0),
        "gradient": jax.grad(paired)(x, amount),
        "remat": jax.grad(jax.checkpoint(paired))(x, amount),
        "loop": lax.scan(again, x, jnp.array([1, -7]) + amount),
        "by a row": jnp.roll(x, x[3, 0].astype(jnp.int32), 0),
        "of two": lax.dynamic_slice_in_dim(jnp.concatenate([x, -x]), amount, ROWS),
    }


@pytest.mark.parametrize("sizes", [(8,), (2, 4), (3,)], ids=str)
def test_rolls_are_those_of_the_plain_step(sizes: tuple[int, ...], integers) -> None:
    mesh, x = cpu_mesh(*sizes), integers((ROWS, COLUMNS))
    sharded = shardfn.fully_shard(step, mesh, axis=mesh.axis_names, donate=False)
    for amount in (0, 5, -1, ROWS, 1000) if len(sizes) == 1 else (7,):
        args = jnp.float32(0), x, jnp.int32(amount)
        expected, got = jax.jit(step)(*args), jax.device_get(sharded(*args))
        jax.tree.map(np.testing.assert_array_equal, expected, got)


@pytest.mark.parametrize("gradient", [False, True])
def test_rows_are_passed_on(gradient: bool) -> None:
    """By 1, 2, 4, 8 and 16 rows of blocks of four: 1, 2, 4, 4 and 4 of them."""
    fn = jax.grad(paired) if gradient else lambda x, k: jnp.roll(x, k, 0)
    sharded = shardfn.fully_shard(lambda s, x, k: (s, fn(x, k)), cpu_mesh(6))
    args = jnp.float32(0), jnp.ones((ROWS, COLUMNS)), jnp.int32(0)
    plan = sharded.plan(*args)
    assert {c.op for c in plan.collectives} == {"ppermute"}
    sent = sum(c.total_bytes for c in plan.collectives) / (4 * COLUMNS)
    assert sent == (2 if gradient else 1) * 15
    assert plan.verify(sharded.lower(*args).compile()).ok
