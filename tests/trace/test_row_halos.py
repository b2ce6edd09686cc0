"""In: steps whose windows slide over the rows of the batch: convolutions, and sums and
extrema. Out: the plain step's values and gradients; where a window makes one result per
row, by a permute of the rows at the edges of each block.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from plan_helpers import cpu_mesh

import shardfn

pytestmark = pytest.mark.standard_promotion

ROWS, COLUMNS, DEVICES = 32, 2, 8  # blocks of four rows


def conv(padding: Any, taps: int = 3, **options: Any) -> Callable:
    kernel = (jnp.arange(taps * COLUMNS * 2.0) % 5 - 2).reshape(taps, COLUMNS, 2)
    numbers = ("NWC", "WIO", "NWC")
    return lambda x: lax.conv_general_dilated(
        x[None], kernel, (1,), padding, dimension_numbers=numbers, **options
    )[0]


def window(op: Any, start: float, rows: int, padding: Any) -> Callable:
    first = np.float32(start)
    return lambda x: lax.reduce_window(x, first, op, (rows, 1), (1, 1), padding)


def after(first: Callable, last: Callable) -> Callable:
    return lambda x: last(first(x))


def in_a_loop(x: jax.Array) -> jax.Array:
    largest = window(lax.max, -np.inf, 3, "SAME")
    return lax.scan(lambda c, _: (largest(c) - 1, c[0]), x, None, length=3)[0]


SUM_5 = window(lax.add, 0, 5, "VALID")

# With each, the rows that its sum of squares sends forward, and that the gradient sends
# in all; None if it gathers some.
CASES: dict[str, tuple[Callable, int | None, int | None]] = {
    "conv": (conv("SAME"), 2, 4),
    "four taps": (conv("SAME", 4), 3, 6),
    "all but the ends": (conv("VALID"), 2, 4),
    "causal": (conv([(2, 0)]), 2, 4),
    "dilated": (conv([(2, 2)], rhs_dilation=(2,)), 4, 8),
    "remat": (jax.checkpoint(conv("SAME")), 2, None),
    "np.convolve": (lambda x: jnp.convolve(x[:, 0], jnp.ones(3), "same"), 2, 4),
    "sum": (window(lax.add, 0, 3, "SAME"), 2, 4),
    "sum of five": (SUM_5, 4, 8),
    "most of a block": (window(lax.add, 0, 4, [(3, 0), (0, 0)]), 3, 6),
    "a block": (window(lax.add, 0, 5, [(4, 0), (0, 0)]), 4, 8),
    "largest": (window(lax.max, -np.inf, 4, "SAME"), 3, None),
    "smallest": (window(lax.min, np.inf, 2, [(1, 0), (0, 0)]), 1, None),
    "twice": (after(SUM_5, SUM_5), 8, None),
    "more than a block": (window(lax.add, 0, 6, [(5, 0), (0, 0)]), None, None),
    "more results than rows": (conv([(2, 2)]), None, None),
    "every second": (conv([(0, 0)], 2, lhs_dilation=(2,)), None, None),
    "loop": (in_a_loop, None, None),
}


def loss(name: str, x: jax.Array) -> jax.Array:
    out = CASES[name][0](x)
    return ((out + 9) ** 2 * (1 + jnp.arange(out.size).reshape(out.shape) % 3)).sum()


def step(names: Iterable[str], state: jax.Array, x: jax.Array) -> Any:
    """Values and gradients, of integers, whose sums are exact."""
    made = {name: CASES[name][0](x) for name in names}
    grads = {name: jax.grad(functools.partial(loss, name))(x) for name in names}
    narrow = lax.reduce_window(
        x.astype(jnp.int8), np.int8(-128), lax.max, (3, 1), (1, 1), "SAME"
    )
    return state, (made, grads, narrow)


@pytest.mark.parametrize(
    "sizes, names",
    [((8,), CASES), ((2, 4), ("conv", "sum of five", "largest")), ((1,), ("conv",))],
)
def test_windows_are_those_of_the_plain_step(
    sizes: tuple[int, ...], names: Iterable[str], integers
) -> None:
    x, plain = integers((ROWS, COLUMNS)), functools.partial(step, names)
    mesh = cpu_mesh(*sizes)
    sharded = shardfn.fully_shard(plain, mesh, axis=mesh.axis_names, donate=False)
    expected, got = jax.jit(plain)(jnp.float32(0), x), sharded(jnp.float32(0), x)
    jax.tree.map(np.testing.assert_array_equal, expected, jax.device_get(got))


@pytest.mark.parametrize("name", CASES)
def test_only_rows_at_the_edges_move(name: str) -> None:
    """Of the value, and of the gradient by itself."""
    _, forward, both = CASES[name]
    for fn, rows in ((loss, forward), (jax.grad(loss, argnums=1), both)):
        run = functools.partial(fn, name)
        sharded = shardfn.fully_shard(lambda s, x, f=run: (s, f(x)), cpu_mesh(DEVICES))
        plan = sharded.plan(jnp.float32(0), jnp.ones((ROWS, COLUMNS)))
        moved = [c for c in plan.collectives if c.op != "all_reduce"]
        if rows is not None:
            assert {c.op for c in moved} <= {"ppermute"}
            sent = sum(c.wire_bytes * ROWS // (4 * np.prod(c.shape)) for c in moved)
            assert sent == rows


def test_windows_that_reach_over_more_than_a_block_gather_the_rows_once() -> None:
    fn = CASES["more than a block"][0]
    sharded = shardfn.fully_shard(lambda s, x: (s, fn(x)), cpu_mesh(DEVICES))
    plan = sharded.plan(jnp.float32(0), jnp.ones((ROWS, COLUMNS)))
    (gather,) = plan.collectives
    assert (gather.op, gather.shape) == ("all_gather", (ROWS, COLUMNS))


@pytest.mark.parametrize("name", ["conv", "sum of five", "a block", "most of a block"])
def test_the_compiled_program_permutes_what_is_planned(name: str) -> None:
    """Also where windows reach more than half of a block, of whose rows the others are
    not read."""
    sharded = shardfn.fully_shard(
        lambda s, x: (s, jax.grad(functools.partial(loss, name))(x)),
        cpu_mesh(DEVICES),
    )
    args = jnp.float32(0), jnp.ones((ROWS, COLUMNS))
    plan = sharded.plan(*args)
    permutes = [c for c in plan.collectives if c.op != "all_reduce"]
    assert {c.op for c in permutes} == {"ppermute"}
    assert plan.verify(sharded.lower(*args).compile()).ok
