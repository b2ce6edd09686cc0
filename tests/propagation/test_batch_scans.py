"""In: scans over the rows of the batch. Out: each device runs its own rows, and their
sums are added up after the loop; loops that depend on their order stay whole.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from plan_helpers import walk
from sharded_and_plain import make_mesh

import shardfn

W = (np.arange(15.0).reshape(5, 3) % 4 - 1).astype(np.float32)
W8 = (np.arange(40.0).reshape(5, 8) % 3).astype(np.float32)
X = (np.arange(80.0).reshape(16, 5) % 7 - 3).astype(np.float32)


def mapped(w, x):
    return jax.lax.map(lambda row: jnp.maximum(row @ w, 0.0), x)


def mapped_reverse(w, x):
    return jax.lax.scan(lambda _, row: (None, row @ w), None, x, reverse=True)[1]


def with_loops(w, x):
    """Loops inside, one of which ends after another number of rounds on each row."""

    def one(row):
        def body(h, _):
            return h * 0.5 + row @ w, h.sum()

        h, sums = jax.lax.scan(body, jnp.zeros(3), None, 2)

        def longer(carry):
            return carry[0] < jnp.abs(row).sum()

        rounds, h = jax.lax.while_loop(longer, lambda c: (c[0] + 1, c[1] + 1), (0.0, h))
        return jax.lax.cond(row[0] > 0, jnp.sin, jnp.cos, h) + sums.sum() + rounds

    return jax.lax.map(one, jax.lax.stop_gradient(x))


def with_keys(w, x):
    keys = jax.random.split(jax.random.key(3), 16)
    return jax.lax.map(lambda k: jax.random.normal(k[0], (3,)) + k[1] @ w, (keys, x))


def summed(w, x):
    def body(total, row):
        y = row @ w
        return total + y, y * 2.0

    total, ys = jax.lax.scan(body, jnp.ones(3), x)
    return ys + total


def counted(w, x):
    count, ys = jax.lax.scan(lambda n, row: (n + 1, row @ w), jnp.int32(2), x)
    return ys * count.astype(jnp.float32)


ROWS: dict[str, Callable] = {
    "map": mapped,
    "reverse": mapped_reverse,
    "keys": with_keys,
    "sum": summed,
    "count": counted,
}


def last(w, x):
    return jax.lax.scan(lambda h, row: (row @ w, h), jnp.zeros(3), x)[1]


def running(w, x):
    def body(total, row):
        total = total + row @ w
        return total, total

    return jax.lax.scan(body, jnp.zeros(3), x)[1]


def printed(w, x):
    def one(row):
        jax.debug.callback(lambda _: None, row[0])
        return row @ w

    return jax.lax.map(one, x)


def constrained(w, x):
    """Splits each row over all devices, which so have to run the same row."""
    return jax.lax.map(lambda row: shardfn.constrain(row @ W8, P("data"))[:3], x)


ORDERED: dict[str, Callable] = {
    "last": last,
    "running": running,
    "printed": printed,
    "constrained": constrained,
}


def check(fn: Callable, mesh: str, differentiate: bool = True):
    def step(w, x):
        def loss(w):
            y = fn(w, x)
            return (y * jnp.cos(jnp.arange(48.0).reshape(16, 3))).sum(), y

        if not differentiate:
            return w, loss(w)
        (value, y), grad = jax.value_and_grad(loss, has_aux=True)(w)
        return w - grad, (value, y)

    mesh_ = make_mesh(mesh)
    axis = mesh_.axis_names if len(mesh_.axis_names) > 1 else "data"
    sharded = shardfn.fully_shard(step, mesh_, axis=axis, min_size=8, donate=False)
    new, measured = sharded(W, X)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        jax.jit(step)(W, X),
        (sharded.unshard(new), measured),
    )
    jaxpr = jax.make_jaxpr(sharded)(W, X).jaxpr
    scans = [e for e, *_ in walk(jaxpr) if e.primitive.name == "scan"]
    return {e.params["length"] for e in scans}, sharded.plan(W, X)


@pytest.mark.parametrize("name", ROWS)
def test_each_device_runs_its_own_rows(name: str) -> None:
    lengths, plan = check(ROWS[name], "2x4" if name == "sum" else "8")
    assert lengths == {2}
    gathered = [c for c in plan.collectives if c.op in ("all_gather", "all_to_all")]
    assert all(c.path for c in gathered)


def outer(w, x):
    return jax.lax.map(lambda row: jnp.tanh(jnp.outer(row, row)).sum() + w.sum(), x)


def adding(w, x):
    """A sum over rows of products with weights, as a sum over microbatches is."""
    return jax.lax.scan(lambda s, row: (s + row @ w, None), jnp.zeros(3), x)[0]


def adding_gradients(w, x):
    """Of each row by itself, as for privacy."""
    one = lambda w, row: (jnp.tanh(row @ w) ** 2).sum()  # noqa: E731
    body = lambda s, row: (s + jax.grad(one)(w, row), None)  # noqa: E731
    return jax.lax.scan(body, jnp.zeros_like(w), x)[0]


@pytest.mark.covering(1)
@pytest.mark.parametrize("fn", [outer, adding, adding_gradients])
@pytest.mark.parametrize("width", [7, 8, 64])
def test_rows_are_no_microbatches_whatever_their_width(fn: Callable, width) -> None:
    """Eight devices divide a width of 8 and of 64: it is not along a row that rows
    lie."""
    w = np.ones((width, 3), np.float32)
    x = np.arange(16 * width, dtype=np.float32).reshape(16, width) % 3
    step = lambda w, x: (w, fn(w, x))  # noqa: E731
    sharded = shardfn.fully_shard(step, make_mesh("8"), min_size=8, donate=False)
    jaxpr = jax.make_jaxpr(sharded)(w, x).jaxpr
    scans = [e for e, *_ in walk(jaxpr) if e.primitive.name == "scan"]
    assert {e.params["length"] for e in scans} == {2}
    moved = {(c.op, c.path) for c in sharded.plan(w, x).collectives if c.shape}
    assert moved <= {("all_gather", ""), ("all_gather", "state"), ("all_reduce", "")}
    np.testing.assert_allclose(sharded(w, x)[1], jax.jit(fn)(w, x), rtol=1e-5)


def test_rows_may_loop_for_different_times() -> None:
    lengths, plan = check(with_loops, "4", differentiate=False)
    assert lengths == {4, 2}
    assert all(c.path or not c.shape for c in plan.collectives)


def test_what_is_carried_unchanged_stays_replicated() -> None:
    def step(w, x):
        def body(carry, row):
            total, kept = carry
            return (total + (row @ w).sum() * kept, kept), None

        (total, kept), _ = jax.lax.scan(body, (3.0, w.sum()), x)
        return w, {"total": total, "kept": kept}

    sharded = shardfn.fully_shard(step, make_mesh("8"), min_size=99, donate=False)
    (_, measured), (_, expected) = sharded(W, X), step(W, X)
    assert measured == expected
    assert measured["kept"].sharding.is_fully_replicated


@pytest.mark.parametrize("start", [1.0, jnp.ones(())])
def test_a_sum_starts_from_its_start_once(start) -> None:
    """A literal is in every device's program, but is one term of the sum."""

    def step(w, x):
        def body(total, s):
            return total + (x * s).sum(), None

        return w, jax.lax.scan(body, start, jnp.arange(4.0))[0]

    sharded = shardfn.fully_shard(step, make_mesh("8"), donate=False)
    assert sharded(W, X)[1] == step(W, X)[1]


@pytest.mark.parametrize("name", ORDERED)
def test_loops_that_depend_on_their_order_run_whole(name: str) -> None:
    lengths, _ = check(ORDERED[name], "8")
    assert 16 in lengths


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_a_reshaped_batch_is_split_inside_each_microbatch(parts: int) -> None:
    """Whatever is done with a microbatch, here each row with all others of it."""

    def step(w, x):
        def body(total, x):
            return total + (jnp.tanh((x @ w) @ (x @ w).T)).sum(), None

        return w, jax.lax.scan(body, 0.0, x.reshape(parts, -1, 5))[0]

    x = np.ones((64, 5), np.float32)
    sharded = shardfn.fully_shard(step, make_mesh("8"), min_size=8, donate=False)
    jaxpr = jax.make_jaxpr(sharded)(W, x).jaxpr
    (scan,) = [e for e, *_ in walk(jaxpr) if e.primitive.name == "scan"]
    assert scan.params["length"] == parts
    np.testing.assert_allclose(sharded(W, x)[1], jax.jit(step)(W, x)[1], rtol=1e-5)


def test_microbatches_are_split_inside() -> None:
    """`[8, 16, ...]` split on dimension 0: an iteration is a microbatch of all."""

    def step(w, batch):
        def body(total, xs):
            x, y = xs
            return total + ((x @ w - y[:, None]) ** 2).sum(), None

        return w, jax.lax.scan(body, 0.0, batch)[0]

    batch = np.ones((8, 16, 5), np.float32), np.ones((8, 16), np.float32)
    sharded = shardfn.fully_shard(step, make_mesh("8"), min_size=8, donate=False)
    assert sharded(W, batch)[1] == step(W, batch)[1]
    assert {c.op for c in sharded.plan(W, batch).collectives} >= {"all_to_all"}
