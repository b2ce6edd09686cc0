"""In: lookups by a count of their own rows, such as `x[arange(n), i]`. Out: they are
split along the rows: a device looks up what it holds, and the values are JAX's own.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plan_helpers import cpu_mesh

import shardfn

ROWS = jnp.arange(16)


def repeated(x: jax.Array, i: jax.Array, rows: jax.Array) -> jax.Array:
    """Lookups and additions in each iteration; `rows` comes from outside."""

    @jax.checkpoint
    def one(x: jax.Array) -> jax.Array:
        columns = (i[:, None] + jnp.int32(x[:, :1, 0] * 0)) % 5
        return x.at[rows, columns].add(jnp.tanh(x[rows, columns]) * 0.0)

    return jax.lax.scan(lambda x, _: (one(x), None), x, length=3)[0]


LOOKUPS: dict[str, Callable] = {
    "pairs": lambda x, i: x[jnp.arange(16), i],
    "negative": lambda x, i: x[jnp.arange(16), -1 - i],
    "middle": lambda x, i: x[jnp.arange(16), :, i],
    "captured": lambda x, i: x[np.arange(16), i],
    "captured by jax": lambda x, i: x[ROWS, i],
    "column": lambda x, i: x[jnp.arange(16)[:, None], i[:, None] + jnp.arange(2)],
    "both": lambda x, i: x[jnp.arange(16)[:, None], i[:, None], jnp.arange(3)],
    "small integers": lambda x, i: x[jnp.arange(16, dtype=jnp.int8), i],
    "set": lambda x, i: x.at[jnp.arange(16), i].set(7.0),
    "add": lambda x, i: x.at[jnp.arange(16), i].add(x[:, 0] * 2.0),
    "max": lambda x, i: x.at[jnp.arange(16), i].max(0.0),
    "outside": lambda x, i: x.at[jnp.arange(16), i * 3].get(mode="fill", fill_value=9),
    "dropped": lambda x, i: x.at[jnp.arange(16), i * 3].add(1.0, mode="drop"),
    "in a remat in a loop": lambda x, i: repeated(x, i, jnp.arange(16)[:, None]),
    "in a loop in a loop": lambda x, i: jax.lax.fori_loop(
        0, 2, lambda _, x: repeated(x, i, ROWS[:, None]), x
    ),
    "in a branch": lambda x, i: jax.lax.cond(
        i[0] < 1, lambda x, rows: x.at[rows, i].add(1.0), lambda x, _: x, x, ROWS
    ),
    "batched already": lambda x, i: jax.vmap(
        lambda x: x[jnp.arange(5), jnp.arange(5) % 3]
    )(x),
}
OTHERS: dict[str, Callable] = {
    "shifted": lambda x, i: x[jnp.arange(16) - 1, i],
    "not all rows": lambda x, i: x[jnp.arange(15), i[:15]],
    "twice": lambda x, i: x[jnp.arange(16) % 8, i],
    "in a loop, others each time": lambda x, i: jax.lax.fori_loop(
        0, 2, lambda k, x: x.at[(ROWS + k) % 16, i].add(x[:, 0] * 2.0), x
    ),
    "in a loop, carried": lambda x, i: jax.lax.fori_loop(
        0, 2, lambda _, c: (c[0].at[c[1], i].add(c[0][:, 0]), c[1][::-1]), (x, ROWS)
    )[0],
}


def results(look: Callable, integers: Callable):
    x = integers((16, 5, 3))
    i = jnp.arange(16) * 7 % 3

    def step(state, x):
        def total(x):
            y = look(x, i)
            return (y * jnp.cos(jnp.arange(y.size).reshape(y.shape))).sum(), y

        grad, y = jax.grad(total, has_aux=True)(x)
        return state, (y, grad)

    sharded = shardfn.fully_shard(step, cpu_mesh(8), strict=True, donate=False)
    plan = sharded.plan(jnp.float32(0), x)
    return step(jnp.float32(0), x)[1], sharded(jnp.float32(0), x)[1], plan


@pytest.mark.parametrize("name", LOOKUPS)
def test_counted_rows_are_looked_up_where_they_are(name: str, integers) -> None:
    expected, got, plan = results(LOOKUPS[name], integers)
    jax.tree.map(np.testing.assert_array_equal, expected, got)
    assert not plan.collectives


@pytest.mark.parametrize("name", OTHERS)
def test_other_rows_are_moved(name: str, integers) -> None:
    expected, got, plan = results(OTHERS[name], integers)
    jax.tree.map(np.testing.assert_array_equal, expected, got)
    moves = {"all_gather", "all_reduce", "psum_scatter"}
    assert {c.op for c in plan.collectives} <= moves
    assert plan.collectives
