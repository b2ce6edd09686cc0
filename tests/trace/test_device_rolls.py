"""In: a `lax.ppermute` inside of a step's own `jax.shard_map`. Out: what `jit` gives,
and collective-permutes where all messages go equally far.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from tiers import tiered

import shardfn

RING = [(i, (i + 1) % 4) for i in range(4)]
PERMUTATIONS = {
    "ring": RING,
    "two back": [(i, (i - 2) % 4) for i in range(4)],
    "open chain": RING[:3],
    "one message": [(2, 1)],
    "swapped pairs": [(0, 1), (1, 0), (2, 3), (3, 2)],
    "some swapped": [(0, 3), (3, 0), (1, 2)],
    "nobody": [],
}


@pytest.mark.parametrize("name", tiered(PERMUTATIONS, ("open chain", "some swapped")))
def test_each_device_receives_what_was_sent(name: str) -> None:
    mesh = jax.make_mesh((4, 2), ("stage", "data"), (AxisType.Auto,) * 2)
    pairs = PERMUTATIONS[name]

    def of_stage(w: jax.Array, x: jax.Array) -> Any:
        everywhere = lax.ppermute(x, "stage", pairs)
        here = lax.ppermute({"w": w, "positive": w > 0}, "stage", pairs)

        def tick(arrived: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            arrived = lax.ppermute(jnp.tanh(arrived @ w[0]), "stage", pairs)
            return arrived, arrived.sum()

        _, sums = lax.scan(tick, x, None, length=3)
        return here["w"], here["positive"], everywhere[None], sums[None]

    def step(w: jax.Array, x: jax.Array) -> Any:
        specs = {"in_specs": (P("stage"), P()), "out_specs": P("stage")}
        names = {"axis_names": {"stage"}, "check_vma": False}
        run = jax.shard_map(of_stage, mesh=mesh, **specs, **names)

        def loss(w: jax.Array) -> tuple[jax.Array, Any]:
            moved, positive, everywhere, sums = run(w, x)
            return jnp.sum(moved**2) + jnp.sum(sums), (positive, everywhere, sums)

        (value, others), grads = jax.value_and_grad(loss, has_aux=True)(w)
        return w - 0.1 * grads, (value, others)

    random = np.random.default_rng(0)
    w = jax.device_put(
        random.normal(size=(4, 6, 6)).astype(np.float32) / 2,
        NamedSharding(mesh, P("stage")),
    )
    x = random.normal(size=(10, 6)).astype(np.float32)
    sharded = shardfn.fully_shard(step, mesh, axis="data", min_size=0, donate=False)
    state = sharded.shard(w)
    plain = jax.jit(step)
    for _ in range(2):
        w, expected = plain(w, x)
        state, got = sharded(state, x)
        for a, b in zip(
            jax.tree.leaves((state, got)), jax.tree.leaves((w, expected)), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    text = sharded.lower(state, x).compile().as_text() or ""
    if name in ("ring", "two back", "open chain", "one message"):
        assert " collective-permute(" in text
