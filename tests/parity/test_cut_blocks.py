"""Rows that are written or read at an index, of a value that every device has whole
and then cuts its block out of.

Most indices are of another device's block. Of one index XLA makes a slice and an update
of a slice, which JAX 0.10 and 0.11 read and wrote at other rows.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from sharded_and_plain import make_mesh

import shardfn

ROWS, WIDTH = 24, 6
Change = Callable[[Array, Array], Array]

WHOLE: dict[str, Callable[[Array], Array]] = {
    "sorted": lambda x: jnp.sort(x, 0),
    "qr": lambda x: jnp.linalg.qr(x)[0],
}

CHANGES: dict[str, Change] = {
    "set": lambda x, i: x.at[i].set(9.0),
    "set_static": lambda x, i: x.at[5].set(9.0),
    "set_last": lambda x, i: x.at[-1].set(9.0),
    "set_element": lambda x, i: x.at[i, 2].set(9.0),
    "set_dropped": lambda x, i: x.at[i + ROWS].set(9.0, mode="drop"),
    "set_clipped": lambda x, i: x.at[i + ROWS].set(9.0, mode="clip"),
    "set_promised": lambda x, i: x.at[i].set(9.0, mode="promise_in_bounds"),
    "set_list": lambda x, i: x.at[i[None]].set(9.0),
    "set_unique": lambda x, i: x.at[i[None]].set(9.0, unique_indices=True),
    "set_two": lambda x, i: x.at[jnp.stack([i, i + 9])].set(9.0),
    "set_rows": lambda x, i: jax.lax.dynamic_update_slice_in_dim(
        x, jnp.full((4, WIDTH), 9.0), i, 0
    ),
    "add": lambda x, i: x.at[i].add(9.0),
    "max": lambda x, i: x.at[i].max(9.0),
    "min": lambda x, i: x.at[i].min(-9.0),
    "multiply": lambda x, i: x.at[i].multiply(9.0),
    "apply": lambda x, i: x.at[i].apply(lambda row: row + 9.0),
    "columns": lambda x, i: x.at[jnp.arange(ROWS), i % WIDTH].set(9.0),
    "get": lambda x, i: x + x[i],
    "get_clipped": lambda x, i: x + x.at[i + ROWS].get(mode="clip"),
    "get_promised": lambda x, i: x + x.at[i].get(mode="promise_in_bounds"),
    "get_filled": lambda x, i: x + x.at[i + ROWS].get(mode="fill", fill_value=3.0),
    "get_list": lambda x, i: x * x.at[i[None] - 1].get(mode="clip"),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("whole", WHOLE)
def test_one_index_into_a_cut_block(change: str, whole: str) -> None:
    """Whichever device has the row, and wherever the others would be moved to."""

    def step(w, x, i):
        grad = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        changed = CHANGES[change](WHOLE[whole](x), i)
        return w - 0.1 * grad, changed * 2.0

    rng = np.random.default_rng(0)
    w = jnp.ones((WIDTH, 8))
    x = jnp.asarray(rng.normal(size=(ROWS, WIDTH)), jnp.float32)
    sharded = shardfn.fully_shard(step, make_mesh("8"), min_size=0, donate=False)
    plain = jax.jit(step)
    for i in (0, 5, ROWS - 1):
        i = jnp.asarray(i)
        np.testing.assert_allclose(
            sharded(w, x, i)[1], plain(w, x, i)[1], rtol=1e-5, atol=1e-6
        )


def test_a_state_that_is_made_whole_and_written_at_an_index() -> None:
    """The next step begins with it."""

    def step(w, x):
        grad = jax.grad(lambda w: jnp.mean((x @ w.T) ** 2))(w)
        return jnp.linalg.qr(w)[0].at[0].set(0.0) - 0.1 * grad, ()

    rng = np.random.default_rng(1)
    w, x = (jnp.asarray(rng.normal(size=(24, 6)), jnp.float32) for _ in range(2))
    mesh = make_mesh("8")
    sharded = shardfn.fully_shard(step, mesh, min_size=0, donate=False, state_argnums=0)
    np.testing.assert_allclose(
        sharded(w, x)[0], jax.jit(step)(w, x)[0], rtol=1e-5, atol=1e-6
    )
