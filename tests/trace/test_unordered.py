"""In: inner products, norms and sums of raveled and concatenated arrays. Out: each
device adds up what it holds; one number is all-reduced, and nothing is gathered.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from plan_helpers import cpu_mesh

import shardfn

KERNEL, MATRIX, VECTOR = (3, 3, 2, 8), (5, 16), (24,)  # stored on the last dimension

REDUCTIONS: dict[str, Callable] = {
    "vdot": lambda g: jnp.vdot(g[0], g[0]),
    "ravel": lambda g: jnp.ravel(g[0] * 2) @ jnp.ravel(jnp.abs(g[0])),
    "of all leaves": lambda g: sum(jnp.vdot(x, x) for x in g),
    "norm": lambda g: jnp.linalg.norm(ravel_pytree(g)[0]) ** 2,
    "concatenated": lambda g: jnp.concatenate([x.ravel() for x in g]).sum(),
    "scaled": lambda g: (ravel_pytree(g)[0] * g[1][0, 0]).sum(),
    "maximum": lambda g: jnp.max(g[0].ravel()),
    "any": lambda g: jnp.float32(jnp.any(g[0].ravel() > 3)),
    "global norm": lambda g: optax.tree.norm(g) ** 2,
    "reshaped twice": lambda g: (g[0].reshape(9, 16).reshape(-1) ** 2).sum(),
}


def arrays(integers) -> tuple[jax.Array, ...]:
    return integers(KERNEL), integers(MATRIX), integers(VECTOR)


@pytest.mark.parametrize("grad", [False, True], ids=["value", "gradient"])
def test_sums_are_those_of_the_plain_step(grad: bool, integers) -> None:
    def step(state, _):
        found = {
            name: jax.grad(fn)(state) if grad else fn(state)
            for name, fn in REDUCTIONS.items()
        }
        return state, found

    state = arrays(integers)
    sharded = shardfn.fully_shard(step, cpu_mesh(8), min_size=0, donate=False)
    with jax.numpy_dtype_promotion("standard"):
        expected, got = step(state, X)[1], sharded(state, X)[1]
    for name, leaves in expected.items():
        pairs = zip(jax.tree.leaves(leaves), jax.tree.leaves(got[name]), strict=True)
        for a, b in pairs:
            np.testing.assert_allclose(a, jax.device_get(b), rtol=1e-6, err_msg=name)


X = jnp.ones(8)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_only_numbers_are_reduced(name: str, integers) -> None:
    with jax.numpy_dtype_promotion("standard"):
        sharded = shardfn.fully_shard(
            lambda state, _: (state, REDUCTIONS[name](state)), cpu_mesh(8), min_size=0
        )
        plan = sharded.plan(arrays(integers), X)
    assert {c.op for c in plan.collectives} == {"all_reduce"}
    assert max(c.wire_bytes for c in plan.collectives) < 8


def test_what_is_raveled_and_shaped_back_stays_where_it_is(integers) -> None:
    def decayed(state, _):
        penalty = jax.grad(lambda w: jnp.vdot(w, w))
        return jax.tree.map(lambda w: w - penalty(w), state), 0.0

    sharded = shardfn.fully_shard(decayed, cpu_mesh(8), min_size=0)
    assert not sharded.plan(arrays(integers), X).collectives


def test_a_sum_behind_hundreds_of_operations_is_planned(integers) -> None:
    def step(state, _):
        raveled = jnp.ravel(state)
        for _ in range(500):
            raveled = jnp.abs(raveled)
        return state, raveled.sum()

    sharded = shardfn.fully_shard(step, cpu_mesh(8), min_size=0)
    plan = sharded.plan(integers(KERNEL), X)
    assert {c.op for c in plan.collectives} == {"all_reduce"}
