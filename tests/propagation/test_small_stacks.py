"""In: loops over layers with small and large leaves. Out: terms of the small ones'
gradients are stacked, and reduced once behind the loop; those of the others are reduced
in it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from plan_helpers import Sharded, cpu_mesh, shard_fn

from shardfn.testing import assert_parity

LAYERS, WIDTH = 6, 16
STATE = {"scale": (LAYERS, WIDTH), "w": (LAYERS, WIDTH, WIDTH)}


def train(state, x, dtype=jnp.float32):
    def layer(h, w):
        w = jax.tree.map(lambda x: x.astype(dtype), w)
        return h + jnp.tanh(h * w["scale"] @ w["w"]), None

    def loss_fn(state):
        h, _ = lax.scan(jax.checkpoint(layer), x.astype(dtype), state)
        return jnp.mean(h.astype(jnp.float32) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), loss


def sums(case: Sharded) -> dict[str, tuple[tuple[int, ...], int]]:
    """Per leaf, of what shape its gradient is reduced, and how often."""
    moved = [c for c in case.plan.collectives if c.phase == "backward"]
    reduced = [c for c in moved if c.op in ("psum_scatter", "all_reduce")]
    return {c.path: (c.shape, c.times) for c in reduced}


IN_LOOP, BEHIND = ((WIDTH,), LAYERS), ((LAYERS, WIDTH), 1)


@pytest.mark.parametrize(
    ("min_size", "scale"),
    [(WIDTH, IN_LOOP), (WIDTH + 1, BEHIND), (WIDTH**2 + 1, BEHIND)],
)
def test_a_stack_of_small_sums_is_reduced_behind_the_loop(min_size, scale) -> None:
    case = shard_fn(train, cpu_mesh(8), STATE, (16, WIDTH), min_size=min_size)
    assert sums(case) == {"scale": scale, "w": ((WIDTH, WIDTH), LAYERS)}


@pytest.mark.parametrize(("layers", "where"), [(16, "behind"), (17, "in")])
def test_no_stack_takes_more_than_the_largest_gradient(layers, where) -> None:
    state = {"scale": (layers, WIDTH), "w": (layers, WIDTH, WIDTH)}
    case = shard_fn(train, cpu_mesh(8), state, (16, WIDTH), min_size=WIDTH + 1)
    shape, times = sums(case)["scale"]
    assert (shape, times) == (
        ((layers, WIDTH), 1) if where == "behind" else ((WIDTH,), layers)
    )


@pytest.mark.parametrize(
    ("made", "asked", "dtype"),
    [
        ("bfloat16", None, "bfloat16"),
        ("bfloat16", "float32", "float32"),
        ("float32", None, "float32"),
    ],
)
def test_the_stack_is_reduced_in_the_dtype_of_its_terms(made, asked, dtype) -> None:
    """As each of them would be in the loop, which casts its gradients to float32."""
    step = functools.partial(train, dtype=made)
    options = {"min_size": WIDTH + 1, "reduce_dtype": asked}
    case = shard_fn(step, cpu_mesh(8), STATE, (16, WIDTH), **options)
    moved = [c for c in case.plan.collectives if c.phase == "backward"]
    found = {c.path: c.dtype for c in moved if c.op == "psum_scatter"}
    assert found == {"scale": dtype, "w": dtype}


@pytest.mark.parametrize("sizes", [(8,), (2, 4), (3,)])
def test_steps_are_the_plain_ones(sizes) -> None:
    rng = np.random.default_rng(0)
    state = {k: rng.standard_normal(v, np.float32) for k, v in STATE.items()}
    batch = rng.standard_normal((24, WIDTH), np.float32)
    mesh = cpu_mesh(*sizes)
    axis = mesh.axis_names if len(sizes) > 1 else "data"
    assert_parity(train, mesh, state, batch, axis=axis, min_size=WIDTH + 1, steps=3)
