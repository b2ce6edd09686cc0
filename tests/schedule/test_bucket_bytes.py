"""In: models with small leaves, and how many bytes move together. Out: fewer
collectives, the same bytes and the same bits, planned, emitted and compiled alike.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layered import layered_loss
from plan_helpers import (
    assert_moves_hold,
    cpu_mesh,
    emitted_moves,
    gathers,
    planned_moves,
    run,
    shard_fn,
    walk,
)
from tiers import exhaustively

import shardfn
from shardfn.testing import assert_parity

LAYERS, WIDTH, HIDDEN = 2, 16, 32
LAYER = {
    "up": (WIDTH, HIDDEN),
    "down": (HIDDEN, WIDTH),
    "scale": (WIDTH,),
    "shift": (HIDDEN,),
    "tiny": (2,),  # stored whole: its gradient is all-reduced
}
ODD = {"odd": (6, 5)}  # stored flattened and padded
HEAD = {"head": (WIDTH, 8), "bias": (8,)}
# Else XLA leaves out roundings to bfloat16 that it sees, and it sees other ones.
EXACT = {"xla_allow_excess_precision": False}
SMALL, HUGE = 200, 2**30


def train(kind: str):
    def layer(h, w):
        inner = jnp.tanh((h * w["scale"]) @ w["up"] + w["shift"])
        h = h + inner @ w["down"] + jnp.repeat(w["tiny"], WIDTH // 2)
        if "odd" in w:
            h = h + jnp.pad(h[:, :6] @ w["odd"], ((0, 0), (0, WIDTH - 5)))
        return h

    loss_fn = layered_loss(kind, layer, lambda s, h: h @ s["head"] + s["bias"])

    def step(state, x):
        loss, grads = jax.value_and_grad(loss_fn)(state, x)
        # An exact product: fused with the difference or not, it rounds the same.
        return jax.tree.map(lambda w, g: w - 0.125 * g, state, grads), loss

    return step


def sharded(kind: str, size: Any, mesh: tuple[int, ...] = (8,), **options: Any):
    stacked = {k: (LAYERS, *shape) for k, shape in LAYER.items()}
    layers = stacked if "scan" in kind else [LAYER | ODD] * LAYERS
    state = {"layers": layers, **HEAD}
    names = ("replica", "data")[-len(mesh) :]
    return shard_fn(
        train(kind),
        cpu_mesh(*mesh),
        state,
        (16, WIDTH),
        axis=names,
        bucket_bytes=size,
        compiler_options=EXACT,
        **options,
    )


ONCE = [("forward", "all_gather"), ("backward", "psum_scatter")]
PASSES = {
    (8,): [*ONCE, ("backward", "all_gather")],
    (2, 4): [*ONCE, ("backward", "all_gather"), ("backward", "all_reduce")],
}


def joined(plan: shardfn.Plan) -> list[tuple[str, str, set[str]]]:
    return [
        (c.phase, c.op, {path.rpartition("/")[2] for path, _ in c.parts})
        for c in plan.collectives
        if c.parts
    ]


@pytest.mark.parametrize("mesh", [(8,), (2, 4)])
def test_a_scanned_layer_moves_its_small_leaves_together(mesh) -> None:
    """Forward, backward and gradients alike; the same bits for every size."""
    cases = [sharded("scan_remat", size, mesh) for size in (0, SMALL, HUGE)]
    alone, small, huge = cases
    assert joined(alone.plan) == []
    few, many = {"scale", "shift"}, {"scale", "shift", "up", "down"}
    each = [joined(case.plan) for case in cases]
    for parts, names in zip(each[1:], (few, many), strict=True):
        for phase, op in PASSES[mesh]:
            assert (phase, op, names) in parts
    assert ("forward", "all_gather", set(HEAD)) in each[2]
    for case in cases:
        assert case.plan.wire_bytes == alone.plan.wire_bytes
        assert case.plan.parameter_bytes == alone.plan.parameter_bytes
        assert_moves_hold(case)
    assert len(huge.plan.collectives) < len(small.plan.collectives)
    results = [run(case, 1) for case in cases]
    for result in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, results[0], result)


@pytest.mark.parametrize("kind", ["scan", exhaustively("unrolled"), "unrolled_remat"])
def test_in_every_kind_of_layers(kind: str) -> None:
    alone, small, huge = (sharded(kind, size) for size in (0, SMALL, HUGE))
    names = {"scale", "shift"} | ({"odd"} if kind != "scan" else set())
    found = set().union(*(names for *_, names in joined(small.plan)))
    assert found >= names
    for case in (small, huge):
        assert case.plan.wire_bytes == alone.plan.wire_bytes
        assert emitted_moves(case) == planned_moves(case.plan)
    assert len(small.plan.collectives) < len(alone.plan.collectives)
    jax.tree.map(np.testing.assert_array_equal, run(alone, 1), run(huge, 1))


def test_large_leaves_are_not_copied() -> None:
    case = sharded("scan_remat", SMALL)
    sizes = [
        v.aval.size * v.aval.dtype.itemsize
        for eqn, *_ in walk(case.local)
        if eqn.primitive.name == "concatenate"
        for v in eqn.outvars
    ]
    assert sizes and max(sizes) <= SMALL
    large = {"up", "down", "head"}
    assert not any(large & names for *_, names in joined(case.plan))


def test_patterns_say_what_may_move_together() -> None:
    plan = sharded("scan_remat", {"layers/scale": 64, "layers/s*": 128}).plan
    assert joined(plan) == [], "leaves of two sizes do not mix"
    plan = sharded("scan_remat", {"layers/s*": 128}).plan
    assert {tuple(sorted(names)) for *_, names in joined(plan)} == {("scale", "shift")}
    text = str(plan)
    assert "layers/{scale, shift}" in text
    assert text.endswith("bucket_bytes: 128 for layers/s*")
    for line in plan.collectives:
        assert not line.parts or sum(b for _, b in line.parts) == line.wire_bytes


def test_together_with_other_options() -> None:
    options = dict(prefetch=1, reshard_after_forward={"layers/down": False})
    case, alone = (sharded("scan_remat", n, **options) for n in (SMALL, 0))
    assert gathers(alone.plan)["shift"] == {"forward": 3, "backward": 3}
    assert ("backward", "all_gather", {"shift", "scale"}) in joined(case.plan)
    assert [c.times for c in case.plan.collectives if c.parts][0] == LAYERS + 1
    assert_moves_hold(case)
    jax.tree.map(np.testing.assert_array_equal, run(case, 1), run(alone, 1))


def test_optimizer_state_alone_is_sharded() -> None:
    """New parameters are gathered together in the update, in one collective."""

    def step(state, x):
        def loss_fn(w):
            return jnp.mean((x @ w["a"] + w["b"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state["w"])
        mean = jax.tree.map(lambda m, g: 0.9 * m + g, state["m"], grads)
        new = jax.tree.map(lambda w, m: w - 0.1 * m, state["w"], mean)
        return {"w": new, "m": mean}, loss

    shapes = {"a": (WIDTH, WIDTH), "b": (WIDTH,)}
    cases = [
        shard_fn(
            step,
            cpu_mesh(4),
            {"w": shapes, "m": shapes},
            (16, WIDTH),
            shard={"w": False},
            bucket_bytes=size,
        )
        for size in (0, HUGE)
    ]
    assert joined(cases[0].plan) == []
    assert ("update", "all_gather", {"a", "b"}) in joined(cases[1].plan)
    assert ("backward", "psum_scatter", {"a", "b"}) in joined(cases[1].plan)
    assert_moves_hold(cases[1])
    jax.tree.map(np.testing.assert_array_equal, run(cases[0], 1), run(cases[1], 1))


@pytest.mark.parametrize("sizes", [(2, 2), (4, 2), (2, 4)], ids=str)
def test_exchanges_over_other_axes_stay_apart(sizes: tuple[int, int]) -> None:
    """Around leaves that stay, one on each axis, activations are exchanged over both,
    by a collective each."""

    def step(state: Any, batch: Any) -> Any:
        made = [jnp.tanh(batch[k] @ state[k]).mean() for k in ("a", "b")]
        return state, made

    rng = np.random.default_rng(0)
    state = {k: jnp.asarray(rng.normal(size=(8, 512)), jnp.float32) for k in "ab"}
    batch = {k: jnp.asarray(rng.normal(size=(4, 4, 8)), jnp.float32) for k in "ab"}
    options: dict[str, Any] = dict(
        axis=("replica", "data"),
        batch_spec=jax.P("replica", "data"),
        min_size=0,
        shard={"a": {"data": 0}, "b": {"replica": 0}},
        stationary=True,
    )
    mesh = cpu_mesh(*sizes)
    assert_parity(step, mesh, state, batch, **options, verify="error")
    plan = shardfn.fully_shard(step, mesh, **options).plan(state, batch)
    exchanged = [c.axis for c in plan.collectives if c.op == "all_to_all"]
    assert {"replica", "data"} <= set(exchanged)


def test_what_makes_a_source_stays_where_it_went_first() -> None:
    """A bucket that takes a later place leaves behind what it had pulled in front, as
    others read that by then: rows of time that are cut, with activations that move."""
    T, B, D, H = 24, 8, 512, 2048

    def step(p, x, c):
        def loss_fn(p):
            logits = (x.reshape(T * B, D) @ p["w"] @ p["a"]).reshape(T, B, 3)
            rewards = logits[1:, :, 0]
            returns = jax.lax.scan(
                lambda a, d: (d + 0.9 * a,) * 2, jnp.zeros(B), rewards, reverse=True
            )[1]
            chosen = jnp.sum(jax.nn.log_softmax(logits[:-1]) * c[1:], -1)
            return jnp.mean(chosen * returns)

        loss, grads = jax.value_and_grad(loss_fn)(p)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads), loss

    keys = iter(jax.random.split(jax.random.key(0), 4))
    p = {
        "w": 0.01 * jax.random.normal(next(keys), (D, H)),
        "a": 0.1 * jax.random.normal(next(keys), (H, 3)),
    }
    batch = [jax.random.normal(next(keys), (T, B, n)) for n in (D, 3)]
    assert_parity(step, cpu_mesh(8), p, *batch, steps=2)
