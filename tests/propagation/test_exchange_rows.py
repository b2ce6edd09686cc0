"""In: operations that need rows of the whole batch, or write them anywhere. Out: as the
plain step; devices exchange rows for parts of all rows around them, where less moves.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from plan_helpers import assert_steps_alike, cpu_mesh
from tiers import exhaustively

import shardfn

pytestmark = pytest.mark.standard_promotion

ROWS, WIDTH = 24, 16
ORDER = np.random.default_rng(3).permutation(ROWS)
ANYWHERE = np.random.default_rng(4).integers(0, ROWS, ROWS)


@pytest.fixture
def bytes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of tests are too small for a further collective to be worth it."""
    for module in ("_propagation.exchange_rows", "_core.sent_bytes"):
        monkeypatch.setattr(f"shardfn.{module}.LATENCY_BYTES", 0)


def sorted_by(x: jax.Array) -> jax.Array:
    """Rows in an order that depends on them."""
    return x[jnp.argsort(x[:, 0])]


def scattered(x: jax.Array) -> jax.Array:
    return jnp.tanh(jnp.zeros_like(x).at[ANYWHERE].add(x))


def written_over(x: jax.Array) -> jax.Array:
    return jnp.zeros_like(x).at[ORDER].set(x, unique_indices=True)


def each_sorted(x: jax.Array) -> jax.Array:
    return jnp.sort(x, axis=0)


def spectrum(x: jax.Array) -> jax.Array:
    return jnp.abs(jnp.fft.fft(x, axis=0))


def of_three(x: jax.Array) -> jax.Array:
    """An array of rows with two dimensions more, of which none is the last."""
    parts = x[..., None] * jnp.arange(1.0, 4.0)
    return jnp.sort(parts, axis=0).sum(-1)


OPS = [
    sorted_by,
    scattered,
    written_over,
    each_sorted,
    spectrum,
    of_three,
]

Step = Callable[..., Any]


def trained(
    op: Callable[[jax.Array], jax.Array], width: int = WIDTH
) -> tuple[Any, ...]:
    """A step through `op`, its state and batch."""

    def loss_fn(p: Any, x: jax.Array) -> jax.Array:
        h = jnp.tanh(x @ p["in"])
        return jnp.mean(((x + op(h)) * p["gain"]) ** 2)

    def train_step(p: Any, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(p, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), loss

    rng = np.random.default_rng(0)
    shapes = {"in": (width, width), "gain": (width,)}
    state = {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in shapes.items()}
    x = jnp.asarray(rng.normal(size=(ROWS, width)), jnp.float32)
    return train_step, state, x


def moved(step: Any, state: Any, x: Any, *rest: Any) -> set[str]:
    """Collectives that move rows of features, in any pass."""
    collectives = step.plan(state, x, *rest).collectives
    return {c.op for c in collectives if {*x.shape} <= {*c.shape} and not c.path}


@pytest.mark.parametrize(
    "sizes, op",
    [
        *itertools.product([(8,), (2, 4)], OPS),
        ((4,), OPS[0]),
        *(exhaustively((4,), op) for op in OPS[1:]),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_rows_are_exchanged(op: Any, sizes: Any, bytes_alone: None) -> None:
    train_step, plain, x = trained(op)
    step = shardfn.fully_shard(
        train_step, cpu_mesh(*sizes), min_size=16, stationary=False
    )
    state = assert_steps_alike(train_step, step, plain, x)
    found = moved(step, state, x)
    assert "all_to_all" in found
    if len(sizes) == 1:
        assert found == {"all_to_all"}


@pytest.mark.covering(1)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("devices, width", [(2, WIDTH), (8, 12)])
def test_they_are_not_where_that_saves_nothing(
    op: Any, devices: int, width: int, bytes_alone: None
) -> None:
    """Each of two devices sends as much; 8 do not divide 12."""
    train_step, plain, x = trained(op, width)
    step = shardfn.fully_shard(
        train_step, cpu_mesh(devices), min_size=16, stationary=False
    )
    state = assert_steps_alike(train_step, step, plain, x)
    assert "all_to_all" not in moved(step, state, x)


def test_a_collective_more_is_worth_some_bytes() -> None:
    train_step, state, x = trained(sorted_by)
    step = shardfn.fully_shard(train_step, cpu_mesh(8), min_size=16, stationary=False)
    assert "all_to_all" not in moved(step, state, x)
    wide = jax.ShapeDtypeStruct((2**18, WIDTH), jnp.float32)
    assert moved(step, state, wide) == {"all_to_all"}


def looked_up_often(p: Any, x: jax.Array, numbers: jax.Array) -> Any:
    """One gather of the rows is for all eight lookups."""
    found = (jnp.sin(x[numbers[:, i]] * (i + 1)) for i in range(8))
    return p, jnp.mean(sum(found, jnp.zeros_like(x)) ** 2)


def looked_up_in_a_loop(p: Any, x: jax.Array, numbers: jax.Array) -> Any:
    """One gather in front of the loop is for all iterations."""

    def add(total: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
        return total + jnp.sin(x[numbers[:, i]]), None

    total, _ = lax.scan(add, jnp.zeros_like(x), jnp.arange(8))
    return p, jnp.mean(total**2)


@pytest.mark.parametrize("step", [looked_up_often, looked_up_in_a_loop])
def test_the_whole_step_has_to_send_less(
    step: Any, bytes_alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    p = {"gain": jnp.ones(WIDTH)}
    x = jnp.asarray(rng.normal(size=(ROWS, WIDTH)), jnp.float32)
    numbers = jnp.asarray(rng.integers(0, ROWS, (ROWS, 8)), jnp.int32)
    run = shardfn.fully_shard(step, cpu_mesh(4), min_size=64)
    assert "all_to_all" not in moved(run, p, x, numbers)
    _, loss = run(run.shard(p), x, numbers)
    np.testing.assert_allclose(loss, jax.jit(step)(p, x, numbers)[1], rtol=1e-5)
    at = "shardfn._lowering.plan_jaxpr.has_exchanges"
    monkeypatch.setattr(at, lambda body: False)
    by_itself = shardfn.fully_shard(step, cpu_mesh(4), min_size=64)
    assert "all_to_all" in moved(by_itself, p, x, numbers)


def test_the_plan_says_why(bytes_alone: None) -> None:
    train_step, state, x = trained(sorted_by)
    step = shardfn.fully_shard(train_step, cpu_mesh(8), min_size=16, stationary=False)
    plan = step.plan(state, x)
    places = {c.place for c in plan.collectives if c.op == "all_to_all"}
    why = "".join(map(plan.explain, places))
    assert "this sends at least 20% less than to gather rows of the batch" in why
    named = "(limits.EXCHANGE_SHARE, limits.LATENCY_BYTES, limits.LOOP_MOST)"
    assert named in why


def test_no_leaf_moves_otherwise(bytes_alone: None) -> None:
    """Weights are gathered, and their gradients scattered, as without."""
    ops = {}
    for op in (sorted_by, jnp.tanh):
        train_step, state, x = trained(op)
        step = shardfn.fully_shard(
            train_step, cpu_mesh(8), min_size=16, stationary=False
        )
        plan = step.plan(state, x)
        ops[op] = [(c.path, c.op, c.phase) for c in plan.collectives if c.path]
    first, second = ops.values()
    assert first == second


EXPERTS, CHOSEN, LAYERS = 3, 2, 2


def experts(w: Any, x: jax.Array) -> jax.Array:
    """Each row through those that weigh most for it, sorted into ragged groups."""
    weight, expert = lax.top_k(jax.nn.softmax(x @ w["router"]), CHOSEN)
    order = jnp.argsort(expert.reshape(-1))
    sizes = jnp.bincount(expert.reshape(-1), length=EXPERTS)
    taken = x[order // CHOSEN]
    hidden = jax.nn.silu(lax.ragged_dot(taken, w["gate"], sizes))
    made = lax.ragged_dot(
        hidden * lax.ragged_dot(taken, w["in"], sizes), w["out"], sizes
    )
    back = made[jnp.argsort(order)].reshape(-1, CHOSEN, WIDTH)
    return jnp.einsum("tkd,tk->td", back, weight)


@pytest.mark.parametrize("sizes", [(8,), (3,), (2, 4)], ids=str)
def test_rows_of_ragged_groups_are_split(
    sizes: Any, bytes_alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dropless mixture of experts: no device multiplies what another does."""
    monkeypatch.setattr("shardfn._api.plan_warnings.REPLICATED_FLOPS", 0)
    tx = optax.adamw(1e-2)

    def loss_fn(p: Any, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: Any) -> Any:
            return x + experts(w, x), None

        x, _ = lax.scan(jax.checkpoint(layer), x, p)
        return jnp.mean(x**2)

    def train_step(state: Any, x: jax.Array) -> Any:
        p, opt = state
        loss, grads = jax.value_and_grad(loss_fn)(p, x)
        updates, opt = tx.update(grads, opt, p)
        return (optax.apply_updates(p, updates), opt), loss

    rng = np.random.default_rng(0)
    shapes = {
        "router": (WIDTH, EXPERTS),
        "gate": (EXPERTS, WIDTH, 32),
        "in": (EXPERTS, WIDTH, 32),
        "out": (EXPERTS, 32, WIDTH),
    }
    p = {
        k: jnp.asarray(rng.normal(size=(LAYERS, *s)) / 4, jnp.float32)
        for k, s in shapes.items()
    }
    x = jnp.asarray(rng.normal(size=(ROWS, WIDTH)), jnp.float32)
    step = shardfn.fully_shard(
        train_step, cpu_mesh(*sizes), min_size=64, stationary=False
    )
    state = assert_steps_alike(train_step, step, (p, tx.init(p)), x, steps=3)
    rows = (ROWS, WIDTH), (ROWS * CHOSEN, WIDTH), (ROWS * CHOSEN, 32)
    moves = [c for c in step.plan(state, x).collectives if c.shape in rows]
    assert moves
    if sizes == (8,):
        assert {c.op for c in moves} == {"all_to_all"}
        assert not any(c.shape[1] == 32 for c in moves)


def test_rows_are_exchanged_where_a_device_would_hold_too_many(
    bytes_alone, monkeypatch
) -> None:
    """In each epoch, where one gather of all would send less."""
    rows, features, epochs = 48, 40, 8

    def step(w, batch):
        x, orders = batch

        def epoch(w, order):
            def loss_fn(w):
                parts = x[order].reshape(2, -1, features)
                return jnp.mean(jnp.tanh(parts @ w) ** 2)

            return w - jax.grad(loss_fn)(w), None

        return jax.lax.scan(epoch, w, orders)[0], x.sum()

    mesh = cpu_mesh(4)
    keys = jax.random.split(jax.random.key(0), epochs)
    orders = jax.vmap(lambda key: jax.random.permutation(key, rows))(keys)
    batch = jax.random.normal(jax.random.key(1), (rows, features)), orders
    w = jax.random.normal(jax.random.key(2), (features, 8)) / 8
    spec = jax.P("data"), jax.P()

    def moved() -> set[str]:
        run = shardfn.fully_shard(step, mesh, min_size=0, batch_spec=spec)
        lines = run.plan(w, batch).collectives
        return {line.op for line in lines if line.shape[-1:] == (features,)}

    assert "all_gather" in moved()
    monkeypatch.setattr("shardfn._lowering.replanning.LOOP_MOST", 0)
    exchanged = moved()
    assert "all_to_all" in exchanged and "all_gather" not in exchanged
    run = shardfn.fully_shard(
        step, mesh, min_size=0, batch_spec=spec, donate=False, stationary=False
    )
    found, expected = run(w, batch), jax.jit(step)(w, batch)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-6)
