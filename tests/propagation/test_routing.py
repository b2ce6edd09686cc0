"""In: experts that rows are sent to by sorting, scattering, choosing or in ragged
groups. Out: as the plain step; rows are exchanged, and experts are in no collective.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plan_helpers import assert_steps_alike, cpu_mesh

import shardfn

pytestmark = pytest.mark.standard_promotion

D, F, EXPERTS, GROUPS, ROWS = 48, 48, 24, 24, 20

Route = tuple[jax.Array, Callable[[jax.Array], jax.Array]]
"""Rows for each expert, and how what it makes of them goes back."""


def by_scatter(x: jax.Array, gates: jax.Array, capacity: int) -> Route:
    """Each row is added to a slot of its expert, in the order of the rows."""
    gate, expert = gates.max(-1), gates.argmax(-1)
    counts = jnp.cumsum(jax.nn.one_hot(expert, EXPERTS, dtype=jnp.int32), axis=0)
    place = jnp.take_along_axis(counts, expert[:, None], axis=1)[:, 0] - 1
    inside = place < capacity
    slots = jnp.zeros((EXPERTS, capacity, D))
    slots = slots.at[expert, place].add(x * inside[:, None], mode="drop")

    def back(made: jax.Array) -> jax.Array:
        rows = made.at[expert, place].get(mode="fill", fill_value=0.0)
        return rows * (gate * inside)[:, None]

    return slots, back


def by_sort(x: jax.Array, gates: jax.Array, capacity: int) -> Route:
    """Rows are sorted by expert; each takes the first of its own."""
    gate, expert = gates.max(-1), gates.argmax(-1)
    order, sizes = jnp.argsort(expert), jnp.bincount(expert, length=EXPERTS)
    at = (jnp.cumsum(sizes) - sizes)[:, None] + jnp.arange(capacity)
    row = order[jnp.minimum(at, len(order) - 1)]
    valid = (jnp.arange(capacity) < sizes[:, None])[..., None]

    def back(made: jax.Array) -> jax.Array:
        return jnp.zeros_like(x).at[row].add(made * valid) * gate[:, None]

    return x[row] * valid, back


def by_choice(x: jax.Array, gates: jax.Array, capacity: int) -> Route:
    """Each expert takes the rows that weigh most for it."""
    gate, row = jax.lax.top_k(gates.T, capacity)
    return x[row], lambda made: jnp.zeros_like(x).at[row].add(made * gate[..., None])


def of_groups(route: Callable[..., Route], p: Any, x: jax.Array) -> jax.Array:
    """Each group of rows has its own places."""
    gates = jax.nn.softmax(x @ p["router"])
    slots = jax.vmap(lambda x, g: route(x, g, 1)[0])(x, gates)
    made = run(p, slots)
    return jax.vmap(lambda x, g, y: route(x, g, 1)[1](y))(x, gates, made)


def of_all(route: Callable[..., Route], p: Any, x: jax.Array) -> jax.Array:
    """The rows of the whole batch take places together."""
    rows = x.reshape(-1, D)
    slots, back = route(rows, jax.nn.softmax(rows @ p["router"]), GROUPS)
    return back(run(p, slots)).reshape(x.shape)


def run(p: Any, slots: jax.Array) -> jax.Array:
    hidden = jnp.tanh(jnp.einsum("...ecd,edf->...ecf", slots, p["up"]))
    return jnp.einsum("...ecf,efd->...ecd", hidden, p["down"])


def ragged(_: Any, p: Any, x: jax.Array) -> jax.Array:
    rows = x.reshape(-1, D)
    gates = jax.nn.softmax(rows @ p["router"])
    order = jnp.argsort(gates.argmax(-1))
    sizes = jnp.bincount(gates.argmax(-1), length=EXPERTS)
    hidden = jnp.tanh(jax.lax.ragged_dot(rows[order], p["up"], sizes))
    made = jax.lax.ragged_dot(hidden, p["down"], sizes)
    out = jnp.zeros_like(rows).at[order].set(made) * gates.max(-1)[:, None]
    return out.reshape(x.shape)


E_FIRST = {"up": {"data": 0}, "down": {"data": 0}}
F_SPLIT = {"up": {"data": 2}, "down": {"data": 1}}


def make_step(over: Any, route: Any) -> tuple[Any, Any, jax.Array]:
    def loss_fn(p: Any, x: jax.Array) -> jax.Array:
        return (over(route, p, x) ** 2).mean()

    def train_step(p: Any, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(p, x)
        return jax.tree.map(lambda w, g: w - 0.5 * g, p, grads), loss

    rng = np.random.default_rng(0)
    sizes = {"router": (D, EXPERTS), "up": (EXPERTS, D, F), "down": (EXPERTS, F, D)}
    p = {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in sizes.items()}
    return train_step, p, jnp.asarray(rng.normal(size=(GROUPS, ROWS, D)), jnp.float32)


ROUTES = [
    (of_groups, by_sort, E_FIRST),
    (of_groups, by_choice, E_FIRST),
    (of_all, by_scatter, E_FIRST),
    (of_all, by_sort, E_FIRST),
    (of_all, by_choice, E_FIRST),
    (ragged, None, F_SPLIT),
]


@pytest.mark.parametrize("over, route, shard", ROUTES)
def test_experts_are_in_no_collective(over: Any, route: Any, shard: Any) -> None:
    """Rows are exchanged there and back, in each pass, between the rows of the batch,
    parts of all rows, and experts. Ragged rows are gathered instead."""
    train_step, plain, x = make_step(over, route)
    forced = {"up": True, "down": True, "*": False}
    step = shardfn.fully_shard(
        train_step, cpu_mesh(8), min_size=64, shard=shard, stationary=forced
    )
    state = assert_steps_alike(train_step, step, plain, x)
    moves = step.plan(state, x).collectives
    assert not [c for c in moves if c.path and c.path != "router"]
    if over is not ragged:
        rows = [c for c in moves if c.shape[-1:] == (D,) and not c.path]
        assert {c.op for c in rows} == {"all_to_all"}


def test_three_devices() -> None:
    train_step, plain, x = make_step(of_all, by_scatter)
    step = shardfn.fully_shard(
        train_step, cpu_mesh(3), min_size=64, shard=E_FIRST, stationary=True
    )
    assert_steps_alike(train_step, step, plain, x, steps=1)


@pytest.mark.parametrize("over, route, shard", ROUTES)
def test_they_stay_by_themselves(
    over: Any, route: Any, shard: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = "shardfn._lowering.choose_stationary.STATIONARY_BYTES"
    monkeypatch.setattr(at, 0)
    monkeypatch.setattr("shardfn._core.sent_bytes.LATENCY_BYTES", 0)
    train_step, state, x = make_step(over, route)
    wide = jax.ShapeDtypeStruct
    up, down = (EXPERTS, D, 64 * F), (EXPERTS, 64 * F, D)
    state |= {"up": wide(up, jnp.float32), "down": wide(down, jnp.float32)}

    def plan(stationary: Any) -> shardfn.Plan:
        step = shardfn.fully_shard(
            train_step, cpu_mesh(8), min_size=64, shard=shard, stationary=stationary
        )
        return step.plan(state, x)

    chosen, gathered = plan("auto"), plan(False)
    sent, most = (sum(c.total_bytes for c in p.collectives) for p in (chosen, gathered))
    assert sent < 0.8 * most
    assert "; stationary: " in chosen.explain("up")
