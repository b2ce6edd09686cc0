"""In: models, and groups of devices that keep parameters gathered after the forward
pass. Out: a backward pass that gathers within the groups, the same bits, the parts in
memory; and what devices cannot be grouped so.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layered import HIDDEN, KINDS, LAYERS, ROWS, STATE, UNROLLED, WIDTH, train
from plan_helpers import (
    assert_moves_hold,
    assert_steps_alike,
    cpu_mesh,
    emitted_moves,
    gathers,
    planned_moves,
    run,
    shard_fn,
)

import shardfn
from shardfn._core.control import make_control
from shardfn._core.sharding import Axes
from shardfn.analysis import targets

# Else XLA leaves out roundings to bfloat16 that it sees, and it sees other ones.
EXACT = {"xla_allow_excess_precision": False}
WHOLE = 2 * 2 * WIDTH * HIDDEN
"""Bytes of one layer's weights in bfloat16."""


def sharded(kind: str, asked: Any, mesh: tuple[int, ...] = (8,), **options: Any):
    return shard_fn(
        train(kind),
        cpu_mesh(*mesh),
        STATE if "scan" in kind else UNROLLED,
        ROWS,
        axis=("replica", "data")[-len(mesh) :],
        reshard_after_forward=asked,
        compiler_options=EXACT,
        **options,
    )


def within(plan: shardfn.Plan, devices: int) -> set[tuple[str, str]]:
    """Phases and leaves of the gathers between so many devices."""
    return {
        (c.phase, c.path.rpartition("/")[2])
        for c in plan.collectives
        if c.op == "all_gather" and c.devices == devices
    }


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [2, 4])
def test_the_backward_pass_gathers_within_groups(kind: str, group: int) -> None:
    case, again = sharded(kind, group), sharded(kind, True)
    names = {"up", "down", "head"}
    assert within(case.plan, 8) == {("forward", name) for name in names}
    assert within(case.plan, group) == {("backward", name) for name in names}
    assert gathers(case.plan) == gathers(again.plan)
    # Of a whole value S, a group of k sends S (k-1)/k and all n send S (n-1)/n.
    repeats = sum(c["backward"] for c in gathers(case.plan).values()) - 1
    size = WHOLE // 2 * repeats + 4 * WIDTH * 8
    saved = again.plan.wire_bytes - case.plan.wire_bytes
    assert saved == size * 7 // 8 - size * (group - 1) // group
    assert_moves_hold(case)
    jax.tree.map(np.testing.assert_array_equal, run(case, 1), run(again, 1))


def test_on_a_hybrid_mesh() -> None:
    """Groups lie within the axis that parameters are split over."""
    case, again = (sharded("scan_remat", k, (2, 4)) for k in (2, True))
    assert within(case.plan, 2) == {("backward", n) for n in ("up", "down", "head")}
    assert_moves_hold(case)
    jax.tree.map(np.testing.assert_array_equal, run(case, 1), run(again, 1))


def test_leaves_have_their_own_groups_and_other_options() -> None:
    asked = {"*/up": 4, "*/down": 2, "head": True}
    options = dict(prefetch=1, bucket_bytes=2**20, gather_dtype="bfloat16")
    case = sharded("scan_remat", asked, **options)
    assert within(case.plan, 4) == {("backward", "up")}
    assert within(case.plan, 2) == {("backward", "down")}
    gathered = [
        (c.phase, c.path, c.times)
        for c in case.plan.collectives
        if c.op == "all_gather" and c.path.startswith("layers")
    ]
    assert gathered == [
        ("forward", "layers/{up, down}", LAYERS + 1),
        ("backward", "layers/up", LAYERS + 1),
        ("backward", "layers/down", LAYERS + 1),
    ]
    assert emitted_moves(case) == planned_moves(case.plan)
    again = sharded("scan_remat", True, gather_dtype="bfloat16")
    jax.tree.map(np.testing.assert_array_equal, run(case, 1), run(again, 1))


def test_the_state_stays_on_the_callers_mesh() -> None:
    case = sharded("scan_remat", 4)
    state = case.step.shard(jax.tree.map(lambda s: jnp.ones(s.shape), case.state))
    before = jax.tree.map(lambda x: x.sharding, state)
    new, loss = case.step(state, jnp.ones(ROWS))
    assert jax.tree.map(lambda x: x.sharding, new) == before
    assert before == case.step.shardings(new)
    assert tuple(loss.sharding.mesh.axis_names) == ("data",)
    assert all(x.is_deleted() for x in jax.tree.leaves(state)), "donated"


def test_a_group_of_one_keeps_all_and_of_all_nothing() -> None:
    for group, same, shown in ((1, False, False), (8, True, 8)):
        plans = [sharded("scan_remat", asked).plan for asked in (group, same)]
        assert plans[0].body == plans[1].body
        assert f"\nreshard_after_forward: {shown}\n" in str(plans[0])


def test_a_scan_stacks_the_parts() -> None:
    """In memory between the passes: a k-th of what is stacked whole."""
    temporary = {
        k: sharded("scan_remat", k).compile().memory_analysis().temp_size_in_bytes
        for k in (True, 4, False)
    }
    whole = temporary[False] - temporary[True]
    # jax 0.10.2's CPU compiler also stacks copies of them, 0.12 reuses 64 bytes.
    assert 0.95 * LAYERS * WHOLE <= whole <= 2 * LAYERS * WHOLE
    assert 0.9 * whole / 4 <= temporary[4] - temporary[True] <= 1.2 * whole / 4


@pytest.mark.aot("h100:8")
def test_unrolled_layers_keep_parts_and_no_whole_weight() -> None:
    width, hidden, layers, rows = 1024, 4096, 8, 512

    def step(state, x):
        def loss_fn(state):
            h = x.astype(jnp.bfloat16)
            for up, down in state:
                h = h + jnp.tanh(h @ up.astype(h.dtype)) @ down.astype(h.dtype)
            return jnp.mean(h.astype(jnp.float32) ** 2)

        grads = jax.grad(loss_fn)(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), ()

    def abstract(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    state = [(abstract(width, hidden), abstract(hidden, width))] * layers
    temporary = {}
    for asked in (True, 4):
        there = shardfn.fully_shard(
            step, targets.mesh("h100:8"), reshard_after_forward=asked
        )
        compiled = there.lower(state, abstract(rows, width)).compile()
        assert there.plan(state, abstract(rows, width)).verify(compiled).ok
        temporary[asked] = compiled.memory_analysis().temp_size_in_bytes
    whole = layers * 2 * 2 * width * hidden
    assert temporary[4] - temporary[True] <= whole // 4


@pytest.mark.parametrize(
    "asked, devices, wrong",
    [(3, 8, 3), (16, 8, 16), ({"a": 4, "b": 6}, 24, 6), ({"a": 2, "b": 5}, 8, 5)],
)
def test_what_does_not_divide_the_devices(asked, devices: int, wrong: int) -> None:
    control = make_control(reshard_after_forward=asked)
    with pytest.raises(shardfn.ShardingError) as error:
        control.on(Axes(("data",), (devices,)))
    text = str(error.value)
    assert text.startswith(
        f"reshard_after_forward={wrong} does not divide the {devices} devices of mesh "
        "axis 'data' into groups.\n  at test_reshard_within_groups.py:"
    )
    assert "of several numbers, each has to divide the next" in text


def test_errors_come_when_the_mesh_is_known() -> None:
    with pytest.raises(shardfn.ShardingError, match="does not divide the 8 devices"):
        shardfn.fully_shard(train("scan"), cpu_mesh(8), reshard_after_forward=3)
    with pytest.raises(shardfn.ShardingError) as error:
        shardfn.fully_shard(train("scan"), reshard_after_forward=4)
    assert "reshard_after_forward=4 needs a mesh, whose axis" in str(error.value)


def test_names_of_groups() -> None:
    """Parts of an axis, the innermost of them neighbours."""
    axes = Axes(("replica", "data"), (2, 12), groups=(2, 6))
    assert axes.parts == (2, 3, 2)
    assert axes.bound(0) == ("replica",)
    assert axes.bound(1) == ("data__0", "data__1", "data__2")
    assert axes.bound(1, 6) == ("data__1", "data__2")
    assert axes.bound(1, 2) == ("data__2",)
    assert Axes(("data",), (8,)).bound(0) == ("data",)


@pytest.mark.parametrize("remat", [False, True])
def test_a_weight_of_a_loop_on_replicated_values_is_kept_in_parts(remat: bool) -> None:
    """As of a power iteration: what the loop carries is whole on every device, and so
    is the weight, though a part of it was cut off."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        def norm(w: jax.Array) -> jax.Array:
            def one(v: jax.Array) -> jax.Array:
                return jnp.tanh(w @ v)

            body = jax.checkpoint(one) if remat else one
            v, _ = jax.lax.scan(lambda v, _: (body(v), None), jnp.ones(13), length=3)
            return jnp.sum(v**2)

        loss, grads = jax.value_and_grad(norm)(w)
        return w - 0.1 * grads, loss + x.mean()

    case = shard_fn(step, cpu_mesh(4), (13, 13), (8, 13), reshard_after_forward=2)
    assert within(case.plan, 2) == {("backward", "state")}
    w = jnp.asarray(np.random.default_rng(0).normal(size=(13, 13)), jnp.float32)
    assert_steps_alike(step, case.step, w, jnp.ones((8, 13)))
