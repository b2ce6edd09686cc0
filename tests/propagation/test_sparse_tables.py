"""In: optimizers that update only the rows of a table that were looked up. Out: as the
plain step, with tables and moments where they are stored, and less sent than they are.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plan_helpers import QUICK, cpu_mesh

import shardfn
from shardfn.testing import assert_same

pytestmark = pytest.mark.standard_promotion

ROWS, FEATURES, TABLE, WIDTH = 24, 3, 2400, 24
Table = Mapping[str, jax.Array]


def adagrad(t: Table, ids: jax.Array, grads: jax.Array) -> Table:
    """Row-wise: one sum of squares for each row."""
    sums = t["sums"].at[ids].add((grads**2).mean(-1))
    scaled = grads * jax.lax.rsqrt(sums[ids] + 1e-6)[..., None]
    return {"sums": sums, "rows": t["rows"].at[ids].add(-0.1 * scaled)}


def lazy_adam(t: Table, ids: jax.Array, grads: jax.Array) -> Table:
    """Moments of the rows that were looked up; each lookup adds its part of them."""
    times = jnp.zeros(len(t["rows"])).at[ids].add(1.0)[ids][..., None]
    m = t["m"].at[ids].add(0.1 * (grads - t["m"][ids] / times))
    v = t["v"].at[ids].add(0.01 * (grads**2 - t["v"][ids] / times))
    change = m[ids] * jax.lax.rsqrt(v[ids] + 1e-6) / times
    return {"m": m, "v": v, "rows": t["rows"].at[ids].add(-0.1 * change)}


def unique_adam(t: Table, ids: jax.Array, grads: jax.Array) -> Table:
    """The same, with the gradients of a row that was looked up twice summed first."""
    count = ids.size
    rows, place = jnp.unique(
        ids.reshape(-1), size=count, return_inverse=True, fill_value=len(t["rows"])
    )
    flat = grads.reshape(count, -1)
    summed = jnp.zeros_like(flat).at[place].add(flat)
    m, v, old = (
        t[k].at[rows].get(mode="fill", fill_value=0) for k in ("m", "v", "rows")
    )
    m, v = 0.9 * m + 0.1 * summed, 0.99 * v + 0.01 * summed**2
    new = {"m": m, "v": v, "rows": old - 0.1 * m * jax.lax.rsqrt(v + 1e-6)}
    return {k: t[k].at[rows].set(x, mode="drop") for k, x in new.items()}


def make_step(update: Callable[[Table, jax.Array, jax.Array], Table]) -> Any:
    def train_step(state: Any, batch: Any) -> Any:
        ids = batch["ids"]

        def loss_fn(rows: jax.Array, out: jax.Array) -> jax.Array:
            made = jnp.tanh(rows).reshape(len(rows), -1) @ out
            return ((made - batch["y"]) ** 2).mean()

        rows = state["table"]["rows"][ids]
        loss_and_grads = jax.value_and_grad(loss_fn, argnums=(0, 1))
        loss, (grads, d_out) = loss_and_grads(rows, state["out"])
        table = update(state["table"], ids, grads)
        return {"table": table, "out": state["out"] - 0.1 * d_out}, loss

    return train_step


def make_state(update: Any, size: int, width: int) -> Any:
    table = {"rows": jax.random.normal(jax.random.key(0), (size, width))}
    if update is adagrad:
        table["sums"] = jnp.full(size, 0.1)
    else:
        table |= {"m": jnp.zeros((size, width)), "v": jnp.full((size, width), 0.1)}
    out = jax.random.normal(jax.random.key(1), (FEATURES * width, 2))
    return {"table": table, "out": out}


def make_batch(seed: int) -> Any:
    """Many rows are looked up several times."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, TABLE // 40, (ROWS, FEATURES)) * 40
    return {
        "ids": ids.astype(np.int32),
        "y": rng.normal(size=(ROWS, 2)).astype(np.float32),
    }


def columns(update: Any) -> dict[str, Any]:
    names = ("rows",) if update is adagrad else ("rows", "m", "v")
    return {f"table/{name}": {"data": 1} for name in names}


def sharded(update: Any, by_columns: bool, devices: int) -> shardfn.ShardedStep:
    return shardfn.fully_shard(
        make_step(update),
        cpu_mesh(devices),
        min_size=64,
        stationary={"table": True},
        shard=columns(update) if by_columns else None,
        compiler_options=QUICK,
    )


@pytest.mark.parametrize(
    "update, by_columns, devices",
    [(adagrad, False, 8), (lazy_adam, True, 3), (unique_adam, True, 8)],
)
def test_rows_are_updated_as_on_one_device(
    update: Any, by_columns: bool, devices: int
) -> None:
    step = sharded(update, by_columns, devices)
    assert_alike(step, update, make_state(update, TABLE, WIDTH))


@pytest.mark.parametrize("update", [adagrad, lazy_adam])
def test_tables_stay_whose_rows_no_devices_divide(update: Any) -> None:
    """Rows are padded as they are stored, and looked up and written where they are."""
    step, plain = sharded(update, False, 8), make_state(update, 2403, 27)
    plan = step.plan(jax.eval_shape(lambda: plain), make_batch(0))
    assert "padding dimension 0 of 2403" in plan.explain("table/rows")
    assert not [c for c in plan.collectives if c.shape == (2403, 27)]
    assert_alike(step, update, plain)


def assert_alike(step: shardfn.ShardedStep, update: Any, plain: Any) -> None:
    state = step.shard(plain)
    run = jax.jit(make_step(update), compiler_options=QUICK)
    for k in range(3):
        plain, loss = run(plain, make_batch(k))
        state, sharded_loss = step(state, make_batch(k))
        assert_same(loss, sharded_loss, f"step {k + 1}, loss", tol=1e-5)
        assert_same(plain, step.unshard(state), f"step {k + 1}, state", tol=1e-5)


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("update", [adagrad, lazy_adam, unique_adam])
def test_tables_stay(update: Any, by_columns: bool) -> None:
    step = sharded(update, by_columns, 8)
    state = jax.eval_shape(lambda: make_state(update, TABLE, WIDTH))
    moved = step.plan(state, make_batch(0)).collectives
    assert not [c for c in moved if c.shape == (TABLE, WIDTH)]
    assert sum(c.total_bytes for c in moved) < TABLE * WIDTH * 4


@pytest.mark.parametrize("update", [adagrad, lazy_adam])
def test_large_tables_stay_by_default(update: Any) -> None:
    """Nothing is asked for; 4096 rows of a table of a million."""
    size, width, rows = 2**20, 64, 4096
    step = shardfn.fully_shard(make_step(update), cpu_mesh(8))
    state = jax.eval_shape(lambda: make_state(update, size, width))
    batch = {
        "ids": jax.ShapeDtypeStruct((rows, FEATURES), jnp.int32),
        "y": jax.ShapeDtypeStruct((rows, 2), jnp.float32),
    }
    plan = step.plan(state, batch)
    assert not [c for c in plan.collectives if c.shape == (size, width)]
    assert plan.wire_bytes < size * width * 4 / 4
