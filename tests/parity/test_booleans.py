"""In: steps that reduce booleans over rows of the batch, into a leaf that is stored
split. Out: as the plain step, whichever operation it is.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from plan_helpers import cpu_mesh

from shardfn.testing import assert_parity

ROWS, WIDTH = 16, 8
NUMBERS = np.random.default_rng(1).integers(0, WIDTH, ROWS).astype(np.int32)


def conv(x: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(x.T[..., None], x.T[..., None], (1,), "VALID")[
        ..., 0
    ]


def scattered(op: str) -> Callable[[jax.Array], jax.Array]:
    return lambda x: getattr(x[:WIDTH].at[NUMBERS], op)(x)


SEEN: dict[str, Callable[[jax.Array], jax.Array]] = {
    "dot": lambda x: x.T @ ~x,
    "einsum": lambda x: jnp.einsum("ab,ac,ad->bd", x, x, ~x),
    "conv": conv,
    "any": lambda x: x.any(0),
    "all": lambda x: ~x.all(0),
    "max": lambda x: x.max(0),
    "min": lambda x: ~x.min(0),
    "xor": lambda x: lax.reduce_xor_p.bind(x, axes=(0,)),
    "segment_max": lambda x: jax.ops.segment_max(x, NUMBERS, WIDTH),
    "segment_min": lambda x: jax.ops.segment_min(x, NUMBERS, WIDTH),
    "scatter_max": scattered("max"),
    "scatter_min": scattered("min"),
    "cumulative": lambda x: lax.associative_scan(jnp.logical_or, x)[-WIDTH:],
    "taken": lambda x: x[NUMBERS[:WIDTH]],
    "loop": lambda x: lax.fori_loop(
        0,
        2,
        lambda i, seen: seen | (x.T @ jnp.roll(x, i, 1)),
        jnp.zeros((WIDTH,) * 2, bool),
    ),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("name", SEEN)
def test_booleans_over_rows(name: str, devices: int) -> None:
    def step(seen: jax.Array, x: jax.Array) -> Any:
        return seen | SEEN[name](x > 1), (SEEN[name](x > 0.5), x.sum())

    x = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, WIDTH)), jnp.float32)
    seen = jnp.zeros((WIDTH, WIDTH), bool)
    assert_parity(step, cpu_mesh(devices), seen, x, state_argnums=0, min_size=0)
