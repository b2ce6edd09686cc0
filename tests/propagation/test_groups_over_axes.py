"""In: rows over several mesh axes that are cut into groups of any number, worked on
along these, and joined again; meshes whose axes are named in another order. Out: the
numbers of the plain program, and a plan that the compiled program agrees with.
"""

import math
from collections.abc import Callable, Collection, Iterator

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from tiers import exhaustively

import shardfn
from shardfn.testing import assert_same

ROWS, WIDE = 24, 5
MESHES = {
    "2x4": ((2, 4), ("replica", "data"), ("replica", "data")),
    "4x2": ((4, 2), ("replica", "data"), ("replica", "data")),
    "3x2": ((3, 2), ("replica", "data"), ("replica", "data")),
    "2x3": ((2, 3), ("replica", "data"), ("replica", "data")),
    "2x2x2": ((2, 2, 2), ("a", "b", "c"), ("a", "b", "c")),
    "2x4 in another order": ((2, 4), ("data", "replica"), ("replica", "data")),
}
COUNTS = 2, 3, 4, 6, 8, 12
# As many groups as one axis has, or all, or more; a part of them, and what devices do
# not divide: each on eight devices and on six, and some with the axes otherwise.
QUICK: dict[str, Collection[int]] = {
    "2x4": COUNTS,
    "4x2": (2, 4),
    "3x2": COUNTS,
    "2x3": (2, 3),
    "2x2x2": (4, 6),
    "2x4 in another order": (2, 8),
}

Rows = Callable[[jax.Array], jax.Array]


def in_groups(count: int) -> Iterator[Rows]:
    """What is done to groups of rows, with the rows joined again."""

    def cut(x: jax.Array) -> jax.Array:
        return x.reshape(count, -1, WIDE)

    yield lambda x: jnp.cumsum(cut(x), 0).reshape(-1, WIDE)
    yield lambda x: cut(x)[::-1].reshape(-1, WIDE) * x
    yield lambda x: jnp.sort(cut(x), 0).reshape(-1, WIDE)
    yield lambda x: cut(x).swapaxes(0, 1).reshape(-1, WIDE) * x
    yield lambda x: cut(x).swapaxes(0, 1).reshape(-1, WIDE) * 2
    yield lambda x: lax.cond(
        x.sum() > 0, lambda y: y * 2, lambda y: y[::-1], cut(x)
    ).reshape(-1, WIDE)
    yield lambda x: jnp.roll(cut(x), 1, 0).reshape(-1, WIDE) + x


def of_rows() -> Iterator[Rows]:
    yield lambda x: jnp.concatenate([x, jnp.tanh(x)])
    yield lambda x: jnp.roll(x, 5, 0) - x
    yield lambda x: jnp.cumsum(x, 0)
    yield lambda x: x[: len(x) // 2] + x[len(x) // 2 :]


@pytest.mark.parametrize(
    "count, mesh",
    [
        (count, mesh) if count in QUICK[mesh] else exhaustively(count, mesh)
        for count in COUNTS
        for mesh in MESHES
    ],
)
def test_groups_of_rows_are_those_of_the_plain_program(mesh: str, count: int) -> None:
    sizes, names, axis = MESHES[mesh]
    each = [*in_groups(count), *(of_rows() if count == 2 else ())]

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        return w, [f(x) for f in each]

    devices = jax.devices()[: math.prod(sizes)]
    sharded = shardfn.fully_shard(
        step,
        jax.make_mesh(sizes, names, devices=devices),
        axis=axis,
        state_argnums=0,
        donate=False,
    )
    w, x = jnp.zeros(()), jax.random.normal(jax.random.key(count), (ROWS, WIDE))
    assert_same(jax.jit(step)(w, x), sharded(w, x), "groups", tol=1e-5)
    found = sharded.plan(w, x).verify(sharded.lower(w, x).compile())
    assert not found.extra
    assert {line.status for line in found.lines} <= {"present", "shared", "merged"}
