"""In: steps that pair the rows of the batch with their neighbours. Out: the plain
step's values and gradients, by a permute of the rows at the edges of each block.
"""

import functools
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from plan_helpers import cpu_mesh

import shardfn

ROWS, COLUMNS, DEVICES = 32, 3, 8  # blocks of four rows


def rolled(*shift: int, axis: int | tuple[int, ...] = 0) -> Callable:
    return lambda x: jnp.roll(x, shift, axis if len(shift) > 1 else (axis,))


def edge(x: jax.Array) -> jax.Array:
    return jnp.concatenate([x[:1], x[:-1]])


def swapped(x: jax.Array) -> jax.Array:
    return jnp.concatenate([x[20:], x[3:20], x[:3]])


# With each, the rows that it sends forward, and how often.
SHIFTS: dict[str, tuple[Callable, list[int]]] = {
    "one": (rolled(1), [1]),
    "back": (rolled(-1), [1]),
    "smaller than a block": (rolled(3), [3]),
    "smaller, back": (rolled(-3), [3]),
    "a block": (rolled(4), [4]),
    "two blocks back": (rolled(-8), [4]),
    "more than a block": (rolled(5), [1, 4]),
    "almost two blocks": (rolled(7), [1, 4]),  # two less one row
    "half": (rolled(16), [4]),
    "all around": (rolled(33), [1]),
    "not at all": (rolled(32), []),
    "two dimensions": (rolled(1, 2, axis=(0, 1)), [1]),
    "another dimension": (rolled(1, axis=1), []),
    "zeros first": (lambda x: jnp.pad(x[:-2], ((2, 0), (0, 0))), [2]),
    "zeros last": (lambda x: jnp.pad(x[1:], ((0, 1), (0, 0))), [1]),
    "zeros joined": (lambda x: jnp.concatenate([0 * x[:1] * 0, x[:-1]]), None),
    "pushed": (lambda x: lax.pad(x, jnp.float32(0), ((1, -1, 0), (0, 0, 0))), [1]),
    "the first again": (edge, [1]),
    "pieces": (swapped, [1, 3, 4, 4]),
    "cut twice": (lambda x: jnp.pad(x[1:][:-1], ((1, 1), (0, 0))), []),
    "of two": (lambda x: jnp.concatenate([x[1:], (2 * x)[:1]]), [1, 1]),
}


def step(names: Iterable[str], state: jax.Array, x: jax.Array):
    """Values and gradients of some: of integers, whose sums are exact."""

    def paired(fn: Callable) -> Callable:
        return lambda x: (x * fn(x) * (1 + jnp.arange(ROWS)[:, None] % 5)).sum()

    fns = {name: SHIFTS[name][0] for name in names}
    return state, {name: (fn(x), jax.grad(paired(fn))(x)) for name, fn in fns.items()}


ACROSS = (
    "one",
    "smaller than a block",
    "more than a block",
    "two blocks back",
    "zeros last",
    "pieces",
)


@pytest.mark.parametrize(
    "sizes, names", [((8,), SHIFTS), ((2, 4), ACROSS), ((4, 2), ACROSS)]
)
def test_shifts_are_those_of_the_plain_step(
    sizes: tuple[int, ...], names: Iterable[str], integers
) -> None:
    x, plain = integers((ROWS, COLUMNS)), functools.partial(step, names)
    with jax.numpy_dtype_promotion("standard"):
        axes = ("replica", "data") if len(sizes) == 2 else "data"
        sharded = shardfn.fully_shard(plain, cpu_mesh(*sizes), axis=axes, donate=False)
        expected, got = plain(jnp.float32(0), x), sharded(jnp.float32(0), x)
    jax.tree.map(np.testing.assert_array_equal, expected, jax.device_get(got))


@pytest.mark.parametrize("name", SHIFTS)
@pytest.mark.parametrize("sizes", [(8,), (2, 4)], ids=str)
def test_only_rows_at_the_edges_move(name: str, sizes: tuple[int, ...]) -> None:
    fn, rows = SHIFTS[name]
    mesh = cpu_mesh(*sizes)
    sharded = shardfn.fully_shard(
        lambda s, x: (s, fn(x)), mesh, axis=mesh.axis_names[-len(sizes) :]
    )
    plan = sharded.plan(jnp.float32(0), jnp.ones((ROWS, COLUMNS)))
    if rows is not None:
        assert {c.op for c in plan.collectives} <= {"ppermute"}
        sent = [c.wire_bytes // (4 * COLUMNS) for c in plan.collectives]
        assert sorted(sent) == rows


@pytest.mark.parametrize("sizes", [(8,), (2, 4)], ids=str)
@pytest.mark.parametrize("rows, permutes", [(3, 2), (7, 4), (9, 4)])
def test_the_compiled_program_permutes_what_is_planned(
    sizes: tuple[int, ...], rows: int, permutes: int
) -> None:
    def train(w, x):
        def loss(w):
            z = jnp.tanh(x @ w)
            return jnp.mean((z - jnp.roll(z, rows, 0)) ** 2)

        return w - jax.grad(loss)(w), 0.0

    mesh = cpu_mesh(*sizes)
    sharded = shardfn.fully_shard(train, mesh, axis=mesh.axis_names, min_size=0)
    args = jnp.ones((COLUMNS, 16)), jnp.ones((ROWS, COLUMNS))
    plan = sharded.plan(*args)
    assert [c.op for c in plan.collectives].count("ppermute") == permutes
    assert plan.verify(sharded.lower(*args).compile()).ok
