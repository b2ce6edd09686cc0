"""In: steps whose leaves stay, stored as their shapes alone say. Out: the dimensions on
which the leaves are best stored, with which less is sent and the same computed.
"""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from plan_helpers import cpu_mesh

import shardfn
from shardfn._lowering.plan_jaxpr import Planner
from shardfn._propagation.decide_node import Decider
from shardfn.testing import assert_same

ROWS, D, F, HEADS, VOCAB = 8, 64, 256, 8, 512


@pytest.fixture(autouse=True)
def every_saving_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("choose_stationary", "choose_dimensions"):
        at = f"shardfn._lowering.{module}.STATIONARY_BYTES"
        monkeypatch.setattr(at, 0)
    monkeypatch.setattr("shardfn._api.stored_dimensions.STATIONARY_BYTES", 0)
    monkeypatch.setattr("shardfn._core.sent_bytes.LATENCY_BYTES", 64)


def model(p: Any, ids: jax.Array) -> jax.Array:
    x = p["table"][ids]
    q, k, v = (jnp.einsum("bd,dhk->bhk", x, p[n]) for n in "qkv")
    mixed = jax.nn.softmax((q * k).sum(-1, keepdims=True)) * v
    x = x + jnp.einsum("bhk,hkd->bd", mixed, p["o"])
    return x + jnp.tanh(x @ p["up"]) @ p["down"]


SHAPES = {n: (D, HEADS, 16) for n in "qkv"} | {
    "o": (HEADS, 16, D),
    "up": (D, F),
    "down": (F, D),
    "table": (VOCAB, D),
}


def training() -> tuple[Any, Any, jax.Array]:
    rng = np.random.default_rng(0)
    params = {
        k: jnp.asarray(rng.normal(size=s) / 9, jnp.float32) for k, s in SHAPES.items()
    }
    tx = optax.sgd(0.1, momentum=0.9)

    def train_step(state: Any, ids: jax.Array) -> Any:
        params, opt = state
        loss, grads = jax.value_and_grad(lambda p: (model(p, ids) ** 2).mean())(params)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), loss

    ids = jnp.asarray(rng.integers(0, VOCAB, ROWS), jnp.int32)
    return train_step, (params, tx.init(params)), ids


def test_leaves_are_stored_as_they_are_used() -> None:
    """Heads, hidden units and features, as Megatron splits them; moments as their
    parameters are, and leaves that are best stored as they are, not at all."""
    train_step, plain, ids = training()
    mesh = cpu_mesh(8)
    by_shape = shardfn.fully_shard(train_step, mesh, min_size=D)
    abstract = jax.eval_shape(lambda: plain)
    dims = by_shape.best_dimensions(abstract, ids)
    found = {k.removeprefix("0/"): v["data"] for k, v in dims.items() if k[0] == "0"}
    assert found == {"q": 1, "k": 1, "v": 1, "up": 1, "table": 1}
    moments = {k.split("/")[-1]: v["data"] for k, v in dims.items() if k[0] == "1"}
    assert moments == found
    step = shardfn.fully_shard(train_step, mesh, min_size=D, shard=dims)
    state = step.init(lambda: plain)
    plan, before = step.plan(state, ids), by_shape.plan(abstract, ids)
    assert 2 * plan.wire_bytes < before.wire_bytes
    (line,) = (note for note in before.notes if "stored by use" in note)
    assert line.startswith("with shard_for=(state, batch), stored by use: ")
    assert "collectives, by other dimensions of '0/k', '0/q'" in line
    assert line.endswith("(at least 20% saved: limits.STATIONARY_SHARE)")
    assert not any("stored by use" in note for note in plan.notes)
    run = jax.jit(train_step)
    for _ in range(2):
        plain, loss = run(plain, ids)
        state, sharded_loss = step(state, ids)
        assert_same(loss, sharded_loss, "loss", tol=1e-4)
        assert_same(plain, step.unshard(state), "state", tol=1e-4)


def test_what_is_asked_for_is_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardfn._lowering.choose_dimensions.STATIONARY_SHARE", 0.05)
    train_step, plain, ids = training()
    step = shardfn.fully_shard(
        train_step, cpu_mesh(8), min_size=D, shard={"*up": {"data": 0}}
    )
    dims = step.best_dimensions(jax.eval_shape(lambda: plain), ids)
    found = {k.split("/")[-1] for k in dims}
    assert {"q", "k", "v"} <= found and "up" not in found


def mlp(p: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(jnp.tanh(x @ p["in"]) @ p["up"]) @ p["down"]


@pytest.mark.parametrize(
    ("asked", "splits"),
    [
        (None, {"in": (None, "data"), "up": ("data",), "down": ("data",)}),
        ({"up": {"data": 1}}, {"in": (None, "data"), "up": (None, "data")}),
        ({"in": False, "*": "data"}, {"in": (), "up": ("data",)}),
    ],
)
def test_an_example_says_what_leaves_are_stored_for(asked: Any, splits: Any) -> None:
    """What `shard` says of a leaf counts."""
    shapes = {"in": (D, 4 * F), "up": (4 * F, F), "down": (F, D)}
    params = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}
    x = jax.ShapeDtypeStruct((ROWS, D), jnp.float32)
    options: Any = {"min_size": D, "shard": asked}
    step = shardfn.fully_shard(mlp, cpu_mesh(8), shard_for=(params, x), **options)
    specs = {k: tuple(s.spec) for k, s in step.shardings(params).items()}
    assert {k: specs[k] for k in splits} == splits
    by_shape = shardfn.fully_shard(mlp, cpu_mesh(8), **options)
    assert step.plan(params, x).wire_bytes <= by_shape.plan(params, x).wire_bytes


def test_an_example_that_cannot_be_used_is_refused() -> None:
    train_step, plain, ids = training()
    with pytest.raises(shardfn.ShardingError) as wrong:
        shardfn.fully_shard(train_step, cpu_mesh(8), shard_for=[plain, ids])
    assert str(wrong.value).startswith("shard_for is a list, not a tuple of the step's")
    with pytest.raises(shardfn.ShardingError) as no_mesh:
        shardfn.fully_shard(train_step, shard_for=(plain, ids))
    assert str(no_mesh.value).startswith("shard_for needs a mesh: without one nobody")


def test_leaves_that_are_gathered_are_stored_as_they_are() -> None:
    """With so many rows weights move, and no dimension is better than another."""
    train_step, plain, _ = training()
    ids = jax.ShapeDtypeStruct((64 * F,), jnp.int32)
    step = shardfn.fully_shard(train_step, cpu_mesh(8), min_size=D)
    assert step.best_dimensions(jax.eval_shape(lambda: plain), ids) == {}


def test_plans_that_are_compared_share_what_they_decide(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each trial decides no more than what it changes."""
    calls: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def counted(*args: Any, **named: Any) -> Any:
            calls[name] += 1
            return function(*args, **named)

        monkeypatch.setattr(owner, name, counted)

    count(Planner, "plan")
    count(Decider, "site")
    step, state, batch = training()
    shardfn.fully_shard(step, cpu_mesh(8), min_size=0).plan(state, batch)
    assert calls["plan"] > 20
    assert calls["site"] < 100 * calls["plan"]  # 185 if each plan begins anew


def test_a_buffer_that_takes_rows_of_the_batch() -> None:
    """Rows of the batch are named after the leaf that they are written into, and there
    are more of them than results behind the state."""

    def put(buffer: jax.Array, rows: jax.Array, at: jax.Array) -> jax.Array:
        zeros = (jnp.zeros_like(at),) * (rows.ndim - 1)
        return jax.lax.dynamic_update_slice(buffer, rows, (at, *zeros))

    def step(state: Any, rows: Any) -> Any:
        buffer = {k: put(state["buffer"][k], rows[k], state["at"]) for k in rows}
        drawn = jax.random.randint(jax.random.key(0), (32,), 0, 4096)
        seen = {k: b[drawn] for k, b in buffer.items()}

        def loss_fn(w: jax.Array) -> jax.Array:
            gap = jnp.tanh(seen["now"] @ w) - seen["next"] @ w + seen["gain"][:, None]
            return jnp.mean(gap**2)

        loss, grad = jax.value_and_grad(loss_fn)(state["w"])
        new = {"w": state["w"] - grad, "buffer": buffer, "at": state["at"] + 16}
        return new, loss

    def made(rows: int) -> Any:
        keys = jax.random.split(jax.random.key(rows), 3)
        shapes = {"now": (rows, 64), "next": (rows, 64), "gain": (rows,)}
        pairs = zip(shapes.items(), keys, strict=True)
        return {n: jax.random.normal(key, shape) for (n, shape), key in pairs}

    w = jax.random.normal(jax.random.key(1), (64, 64)) / 8
    state, rows = {"buffer": made(4096), "w": w, "at": jnp.int32(0)}, made(16)
    run = shardfn.fully_shard(step, cpu_mesh(8), min_size=0, shard_for=(state, rows))
    new, loss = run(run.shard(state), rows)
    expected, expected_loss = jax.jit(step)(state, rows)
    assert_same(expected, run.unshard(new), "state", tol=1e-4)
    assert_same(expected_loss, loss, "loss", tol=1e-4)
