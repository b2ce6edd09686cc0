"""In: keys, typed and raw. Out: every device count draws the bits of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from sharded_and_plain import make_mesh
from tiers import exhaustively

import shardfn

ROWS = 16


def train_step(state, batch):
    """Draws in the shape of the batch, per row, and in the shape of a parameter."""
    keys = jax.random.split(state["key"], 8)
    x = batch["x"]
    rows = jax.random.split(keys[1], ROWS)
    drawn = {
        "bits": jax.random.bits(keys[2], (*x.shape, 5)),
        "mask": jax.random.bernoulli(keys[3], 0.7, x.shape),
        "integers": jax.random.randint(keys[4], (ROWS, 3), 0, 1000),
        "uniform": jax.random.uniform(keys[5], x.shape),
        "rows": jax.vmap(lambda key: jax.random.bits(key, (3,)))(rows),
        "given": jax.random.bits(batch["key"], x.shape),
        "columns": jax.random.bits(keys[6], x.shape[1:]),
    }
    kept = jnp.where(drawn["mask"], x, 0).sum(0)
    noise = jax.random.uniform(keys[7], state["w"].shape)
    return {"w": noise, "key": keys[0]}, drawn | {"kept": kept}


def raw(seed: int) -> jax.Array:
    return jax.random.key_data(jax.random.key(seed))


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "mesh", ["2", "8", "2x4", "8-auto", exhaustively("1"), exhaustively("4")]
)
@pytest.mark.parametrize("make_key", [jax.random.key, raw])
def test_bits_do_not_depend_on_devices(make_key, mesh: str) -> None:
    state = {"w": jnp.zeros((17, 9)), "key": make_key(1)}
    # Integers: their sums are exact in any order.
    x = np.random.default_rng(0).integers(-4, 5, (ROWS, 36)).astype(np.float32)
    batch = {"x": x, "key": make_key(2)}
    mesh = make_mesh(mesh)
    axis = mesh.axis_names if len(mesh.axis_names) > 1 else "data"
    step = shardfn.fully_shard(
        train_step, mesh, axis=axis, min_size=8, batch_spec={"key": P()}
    )
    expected, sharded = state, step.shard(state)
    for _ in range(2):
        expected, drawn = jax.jit(train_step)(expected, batch)
        sharded, metrics = step(sharded, batch)
        for name, values in drawn.items():
            np.testing.assert_array_equal(metrics[name], values, err_msg=name)
        whole = step.unshard(sharded)
        np.testing.assert_array_equal(whole["w"], expected["w"])
        assert whole["key"].dtype == expected["key"].dtype
