"""Values of two bits, which XLA has no collectives for, and of four, which it widens:
they move as the plain step has them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plan_helpers import cpu_mesh

import shardfn

ROWS, COLUMNS = 16, 8


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", ["int2", "uint2", "int4"])
@pytest.mark.parametrize("bucket_bytes", [0, 1024])
def test_narrow_integers_move(dtype: str, bucket_bytes: int) -> None:
    """Gathered, rolled to neighbours, and combined by maxima and minima, also several
    in one collective."""

    def step(state: Any, x: jax.Array) -> Any:
        w, v = state["w"], state["v"]
        y = jnp.tanh(x @ w.astype(jnp.float32)) @ v.astype(jnp.float32).T
        f = state["f"] - 0.1 * jax.grad(lambda f: jnp.mean((y @ f) ** 2))(state["f"])
        kept = jnp.roll(x.astype(dtype), 3, 0).astype(jnp.float32)
        most = jnp.maximum(state["most"], w.max(0)), jnp.minimum(w.min(0), v.min(0))
        return {"w": w, "v": v, "f": f, "most": most[0]}, (kept, most[1])

    cells = (jnp.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS) // 3) % 2
    state = {
        "w": cells.astype(dtype),
        "v": (1 - cells).astype(dtype),
        "f": jnp.ones((ROWS, COLUMNS)),
        "most": jnp.zeros(COLUMNS, dtype),
    }
    x = cells.astype(jnp.float32) @ jnp.eye(COLUMNS, ROWS)
    sharded = shardfn.fully_shard(
        step, cpu_mesh(8), min_size=0, donate=False, bucket_bytes=bucket_bytes
    )
    plan = sharded.plan(state, x)
    found = [c.op for c in plan.collectives if c.dtype == dtype]
    assert {*found} == {"all_gather", "all_reduce", "ppermute"}
    assert found.count("all_gather") == (1 if bucket_bytes else 2)
    assert plan.verify(sharded.lower(state, x).compile()).ok
    expected, got = jax.jit(step)(state, x), sharded(state, x)
    for a, b in zip(*map(jax.tree.leaves, (expected, got)), strict=True):
        a, b = (np.asarray(y.astype(jnp.float32)) for y in (a, b))
        np.testing.assert_allclose(b, a, rtol=1e-6)
