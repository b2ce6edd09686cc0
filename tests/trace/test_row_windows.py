"""In: steps that compute with most rows of the batch, as all but the first. Out: the
plain step's values and gradients; where each row is computed like the others, by a
permute of the rows at the edges of each block and no gather.
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
KEY = 0


def td_error(x: jax.Array) -> jax.Array:
    """`r + g v' - v` of one trajectory."""
    values, rewards = x.sum(1), x[:, 0]
    return rewards[:-1] + 2 * lax.stop_gradient(values[1:]) - values[:-1]


def stencil(x: jax.Array) -> jax.Array:
    return x[:-2] - 2 * x[1:-1] + 3 * x[2:]


def in_a_loop(x: jax.Array) -> jax.Array:
    """The differences of microbatches of 16 rows."""

    def body(total, rows):
        return total + jnp.sum(jnp.diff(rows, axis=0) ** 2), None

    return lax.scan(body, jnp.float32(0), x.reshape(2, 16, COLUMNS))[0]


def branched(x: jax.Array) -> jax.Array:
    return lax.cond(x[0, 0] > 100, lambda x: x.sum(), lambda x: (x[2:] ** 2).sum(), x)


def weights() -> jax.Array:
    return jnp.arange(COLUMNS * 2, dtype=jnp.float32).reshape(COLUMNS, 2) - 2


# With each, the rows that plan sends; None if it gathers some, in sight.
CASES: dict[str, tuple[Callable, list[int] | None]] = {
    "difference": (lambda x: ((x[1:] - x[:-1]) ** 2).sum(), [1]),
    "backwards": (lambda x: ((x[:-1] - x[1:]) ** 2).sum(), [1]),
    "diff": (lambda x: (jnp.diff(x, axis=0) ** 2).sum(), [1]),
    "twice": (lambda x: (jnp.diff(x, 2, axis=0) ** 2).sum(), [1, 1]),
    "jnp.pad": (
        lambda x: (stencil(jnp.pad(x, ((1, 1), (0, 0)), "edge")) ** 2).sum(),
        None,
    ),
    "a row put in front": (
        lambda x: (jnp.diff(x, axis=0, prepend=x[:1]) ** 2).sum(),
        [1],
    ),
    "stencil": (lambda x: (stencil(jnp.pad(x, ((1, 1), (0, 0)))) ** 2).sum(), [1, 1]),
    "stencil with edges": (
        lambda x: (stencil(jnp.concatenate([x[:1], x, x[-1:]])) ** 2).sum(),
        [1, 1],
    ),
    "three rows apart": (lambda x: ((x[3:] - x[:-3]) ** 2).sum(), [3]),
    "a block apart": (lambda x: ((x[4:] - x[:-4]) ** 2).sum(), [4]),
    "more than a block": (lambda x: (x[5:] * x[:-5]).sum(), [1, 4]),
    "centered": (lambda x: ((x[2:] - 2 * x[1:-1] + x[:-2]) ** 2).sum(), [1, 1]),
    "td error": (lambda x: (td_error(x) ** 2).sum(), [1]),
    "mean": (lambda x: jnp.mean(x[1:] - 2), []),
    "maximum": (lambda x: (x[1:-1] - 9).max(), []),
    "minimum": (lambda x: (x[1:-1] + 9).min(0).sum(), []),
    "some": (lambda x: ((x[1:] > x[:-1]).any(0) * x[0]).sum(), None),
    "every": (lambda x: (x[1:] + 9 > 0).all().astype(x.dtype), []),
    "product": (lambda x: (jnp.clip(x[5:], 1, 2)[:, 0]).prod(), None),
    "narrow": (lambda x: x[1:].astype(jnp.int8).sum().astype(x.dtype), []),
    "product with weights": (lambda x: ((x[1:] @ weights()) ** 2).sum(), []),
    "over rows": (lambda x: ((x[1:].T @ x[:-1]) ** 2).sum(), [1]),
    "ratio": (lambda x: ((x[1:] + 8) / (x[:-1] + 8) > 1).sum() * 1.0, [1]),
    "infinite outside": (
        lambda x: jnp.log2(jnp.where(jnp.arange(ROWS)[:, None] > 0, 4.0, x * 0))[
            1:
        ].sum(),
        [],
    ),
    "turned": (lambda x: (x.T[:, 1:].reshape(COLUMNS, ROWS - 1, 1) ** 2).sum(), []),
    "spread": (lambda x: (x[1:, :1] * jnp.ones(COLUMNS) * x[:-1]).sum(), [1]),
    "first of most": (lambda x: (x[3:][0] * x[0] + x[3:][-1]).sum(), []),
    "most of most": (lambda x: (x[3:][2:][:-1] ** 2).sum(), []),
    "counted": (lambda x: (x[1:] * jnp.arange(ROWS - 1.0)[:, None]).sum(), []),
    "drawn": (
        lambda x: (
            x[1:] * jax.random.randint(jax.random.key(KEY), (ROWS - 1, 3), 0, 9)
        ).sum(),
        [],
    ),
    "remat": (
        lambda x: jax.checkpoint(lambda x: (jnp.diff(x, axis=0) ** 2).sum())(x),
        [1],
    ),
    "loop": (in_a_loop, None),
    "branch": (branched, None),
    "taken": (lambda x: (x[1:][jnp.array([3, 0, 30])] ** 2).sum(), None),
    "put": (lambda x: (x[1:].at[2].set(5.0) * x[:-1]).sum(), None),
    # Where it puts them depends on where a row lies: DependsOnPlace.
    "rows put": (
        lambda x: (lax.dynamic_update_slice(x[1:], 5 * x[:2], (3, 0)) * x[:-1]).sum(),
        None,
    ),
    "added": (lambda x: (x[1:].at[jnp.array([0, 2])].add(5.0) ** 2).sum(), None),
    "window": (lambda x: (lax.dynamic_slice_in_dim(x[1:], 2, 20) ** 2).sum(), None),
    "largest": (lambda x: x[1:, 0].argmax().astype(x.dtype), None),
    "sorted": (lambda x: (jnp.sort(x[1:], 0) * x[:-1]).sum(), None),
    "summed up": (lambda x: (jnp.cumsum(x[1:], 0)).sum(), None),
    "flat": (lambda x: (x[1:].ravel()[:40] ** 2).sum(), None),
    "of another size": (
        lambda x: (x[1:] * jnp.pad(x, ((4, 4), (0, 0)))[5:36]).sum(),
        None,
    ),
    "halves": (lambda x: (x[:16] * x[16:]).sum(), None),
    "returned": (lambda x: ((x[1:] - x[:-1]) * 2).at[0].get().sum(), None),
}
GATHERS = ("all_gather", "psum_scatter", "all_to_all")


def step(names: Iterable[str], state: jax.Array, x: jax.Array):
    """Values and gradients, of integers, whose sums are exact."""
    fns = {name: CASES[name][0] for name in names}
    return state, {name: jax.value_and_grad(fn)(x) for name, fn in fns.items()}


@pytest.mark.parametrize(
    "sizes, names",
    [
        ((8,), CASES),
        ((2, 4), ("diff", "td error", "over rows", "stencil", "more than a block")),
    ],
)
@pytest.mark.standard_promotion
def test_values_are_those_of_the_plain_step(
    sizes: tuple[int, ...], names: Iterable[str], integers
) -> None:
    x, plain = integers((ROWS, COLUMNS)), functools.partial(step, names)
    axes = ("replica", "data") if len(sizes) == 2 else "data"
    sharded = shardfn.fully_shard(plain, cpu_mesh(*sizes), axis=axes, donate=False)
    expected, got = jax.jit(plain)(jnp.float32(0), x), sharded(jnp.float32(0), x)
    jax.tree.map(np.testing.assert_array_equal, expected, jax.device_get(got))


@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    "name", [n for n, (_, rows) in CASES.items() if rows is not None]
)
def test_only_rows_at_the_edges_move(name: str) -> None:
    fn, rows = CASES[name]
    sharded = shardfn.fully_shard(lambda s, x: (s, fn(x)), cpu_mesh(DEVICES))
    plan = sharded.plan(jnp.float32(0), jnp.ones((ROWS, COLUMNS)))
    assert not [c for c in plan.collectives if c.op in GATHERS]
    sent = [c for c in plan.collectives if c.op == "ppermute"]
    assert sorted(c.wire_bytes * ROWS // (4 * np.prod(c.shape)) for c in sent) == rows
