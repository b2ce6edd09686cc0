"""In: loops over layers that gather in turn, on GPUs of several hosts, by default. Out:
what comes before a layer's largest weights is gathered an iteration ahead, and so is
what is small; these gathers begin behind a product, and where the network is what the
loop waits for in front of its sums. The numbers are the same.
"""

import re
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import aot
from jax import lax
from loops_ahead import (
    AHEAD,
    LAYERS,
    WIDTH,
    ahead_of,
    gathered_in,
    in_turn,
    layer,
    loops,
    plain_step,
    sharded,
    state_of,
    values,
)
from plan_helpers import Sharded, cpu_mesh, shard_fn, walk

import shardfn
from shardfn._core import compat
from shardfn._core.barrier import barrier_p
from shardfn._core.plan import Apply, BodyPlan, Reshard
from shardfn._core.program import Program
from shardfn._schedule import (
    balanced_loops,
    order_gathers,
)
from shardfn._schedule.bodies import all_moves
from shardfn.analysis import targets
from shardfn.storage import _stored_layout
from shardfn.testing import assert_parity

KINDS = [(True, 1), (False, 1), (False, 10**9)]
"""Loops that are balanced, that compute for longer, and of these with small parts."""
COMBINES = "xla_gpu_reduce_scatter_combine_threshold_bytes"
IN_FLIGHT = "xla_gpu_experimental_parallel_collective_overlap_limit"


@pytest.mark.parametrize("balanced", [True, False])
def test_what_comes_before_the_largest_and_what_is_small_runs_ahead(balanced) -> None:
    with in_turn(balanced):
        forward, backward = loops(sharded())
    for program, loop in (forward, backward):
        assert ahead_of(program, loop) == AHEAD
        assert {*gathered_in(program, loop.bodies[0])} == {"up", "down"}


def test_other_loops_and_devices_are_left_alone() -> None:
    everything = {*AHEAD, "up", "down"}
    for patched in ("hides_network", "slices"):
        one_host = mock.patch.object(_stored_layout, "slices_of", lambda devices: 1)
        others = mock.patch.object(compat, "hides_network", lambda device: False)
        with in_turn(False), one_host if patched == "slices" else others:
            for program, loop in loops(sharded()):
                assert not loop.ahead
                assert {*gathered_in(program, loop.bodies[0])} == everything
    more: dict[str, Any] = {"SUMS_FLOPS": 10**9, "BALANCED_FLOPS": 10**9}
    with in_turn(False), mock.patch.multiple(balanced_loops, **more):
        assert not any(loop.ahead for _, loop in loops(sharded()))


def test_loops_of_small_parts_gather_ahead_what_their_first_products_use() -> None:
    with in_turn(False, least_part=10**9):
        case = sharded()
        forward, backward = loops(case)
        asked = loops(sharded(prefetch="first"))
        none = loops(sharded(prefetch=0))
        host = loops(sharded(offload={"q": "host"}))
    assert ahead_of(*forward) == {"scale", "q", "k", "v"}
    assert ahead_of(*backward) == {"scale", "q", "k", "v"}
    assert not order_gathers.orders_gathers(case.plan.body)
    assert [ahead_of(*each) for each in asked] == [ahead_of(*forward)] * 2
    assert not any(loop.ahead for _, loop in none)
    assert all("q" not in ahead_of(*each) and "k" in ahead_of(*each) for each in host)
    said = str(case.plan.explain("q"))
    assert "limits.SUMS_FLOPS" in said and "prefetch='auto'" in said
    assert "order_gathers" not in said
    left = str(case.plan.explain("o"))
    assert "do not use it (prefetch='auto')" in left
    gathers = [c for c in case.plan.collectives if c.op == "all_gather"]
    assert {c.times for c in gathers if c.path == "q"} == {LAYERS + 1}
    assert {c.times for c in gathers if c.path == "o"} == {LAYERS}
    assert {c.path for c in gathers if c.ahead} == {"scale", "q", "k", "v"}


def test_what_gathers_more_than_it_sums_is_held_against_what_it_gathers() -> None:
    """As a step that trains little of its weights, whose sums are small."""

    def step(state, base, x):
        def loss_of(state):
            h, _ = lax.scan(jax.checkpoint(layer), x, base | state)
            return jnp.mean(h**2)

        loss, grads = jax.value_and_grad(loss_of)(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), loss

    def ahead(flops: int) -> list[bool]:
        shapes = state_of()
        trained = {"o": shapes.pop("o")}
        with mock.patch.object(balanced_loops, "SUMS_FLOPS", flops):
            states = (arrays(trained), arrays(shapes))
            sharded_step = shardfn.fully_shard(
                step, cpu_mesh(8), state_argnums=(0, 1), stationary=False, min_size=0
            )
            x = jax.ShapeDtypeStruct((64, WIDTH), "float32")
            lines = sharded_step.plan(*states, x).collectives
        gathers = [c for c in lines if c.op == "all_gather" and c.path.endswith("q")]
        return [c.ahead > 0 for c in gathers]

    def arrays(shapes):
        return {k: jax.ShapeDtypeStruct(s, "float32") for k, s in shapes.items()}

    with in_turn(False, least_part=10**9):
        with mock.patch.object(balanced_loops, "CHAINED_BYTES", 1):
            assert ahead(0) == [True, True]
            # Products of 8 rows of a device, three for each weight, by bytes of it:
            # fewer are computed for what is gathered, more for the one sum.
            flops = 8 * 2 * 3 // 4
            assert ahead(flops) == [False, False]
        assert ahead(flops)[1]


def test_products_with_whole_weights_are_first_ones() -> None:
    with in_turn(False, least_part=10**9):
        whole = dict.fromkeys(("scale", *"qkvo"), False)
        forward, _ = loops(sharded(shard=whole))
    assert ahead_of(*forward) == set()


def test_loops_of_small_parts_that_send_for_longer_gather_nothing_ahead() -> None:
    with in_turn(False, least_part=10**9):
        with mock.patch.object(balanced_loops, "SUMS_FLOPS", 10**9):
            assert not any(loop.ahead for _, loop in loops(sharded()))
        with mock.patch.object(compat, "hides_network", lambda device: False):
            assert not any(loop.ahead for _, loop in loops(sharded()))


def test_on_one_host_what_is_asked_ahead_is_in_no_turn() -> None:
    with in_turn(True), mock.patch.object(compat, "hides_network", lambda device: 0):
        case = sharded(prefetch="first")
        assert all(loop.ahead for _, loop in loops(case))
        assert not order_gathers.orders_gathers(case.plan.body)
        alone = sharded()
        assert order_gathers.orders_gathers(alone.plan.body)
        assert not any(loop.ahead for _, loop in loops(alone))


def test_operands_share_the_network_if_their_weights_are_ahead() -> None:
    """Where nothing runs ahead, products of one operand may not need too much."""
    for prefetch in ("auto", 0):
        with in_turn(True), mock.patch.object(balanced_loops, "BALANCED_SHARE", 0):
            case = sharded(prefetch=prefetch)
            is_ordered = order_gathers.orders_gathers(case.plan.body)
        assert is_ordered == (prefetch == "auto")


@pytest.mark.parametrize(
    ("prefetch", "expected"),
    [(0, set()), (1, {*AHEAD, "up", "down"}), ({"q": 0, "*": "auto"}, AHEAD - {"q"})],
)
def test_what_is_asked_counts(prefetch, expected) -> None:
    with in_turn(False):
        case = sharded(prefetch=prefetch)
        found = [ahead_of(*each) for each in loops(case)]
    assert found == [expected] * 2
    # Of what is all ahead, nothing is left to be in turn.
    assert order_gathers.orders_gathers(case.plan.body) == (0 < len(expected) < 8)


def order(program: Program, body: BodyPlan) -> list[str]:
    """Products and sums of a body and of calls in it, and what waits between them."""
    made: list[str] = []
    for step in body.steps:
        if isinstance(step, Reshard):
            if step.in_turn and len(step.path) == 1:
                made.append("coming")
            elif step.gradient and step.path[0] != step.path[-1]:
                made.append("sum")
            continue
        node = program.nodes[step.node]
        if node.is_call:
            made += order(node.bodies[0], step.bodies[0])
        elif node.kind == "op" and node.eqn.primitive.name == "dot_general":
            made.append("product")
    return made


def test_they_wait_for_a_product() -> None:
    """The last but one of a layer's in a forward pass."""
    with in_turn(False):
        (program, forward), (_, backward) = loops(sharded())
    ties = order(program, forward.bodies[0])
    count = sum(len(each.tied) for each in forward.ahead)
    assert ties == ["product"] * 5 + ["coming"] * count + ["product"]
    assert count == len(AHEAD)
    assert all(each.tied and not each.handed for each in backward.ahead)


def test_sums_of_balanced_loops_wait_for_them() -> None:
    with in_turn(True):
        (_, forward), (program, backward) = loops(sharded())
    assert all(each.tied and not each.handed for each in forward.ahead)
    assert all(each.handed and not each.tied for each in backward.ahead)
    ties = order(program, backward.bodies[0])
    assert ties.count("coming") == len(AHEAD)
    first = ties.index("coming")
    assert ties[first : first + len(AHEAD) + 1] == ["coming"] * len(AHEAD) + ["sum"]
    assert "product" in ties[first:]


@pytest.mark.parametrize("balanced", [True, False])
def test_the_second_gather_waits_for_what_products_ahead_multiply(balanced) -> None:
    """The network is free by then: the weights of these products came ahead."""
    with in_turn(balanced):
        program, loop = loops(sharded())[0]
    body = loop.bodies[0]
    while not any(isinstance(s, Reshard) and s.gathers_state for s in body.steps):
        (call,) = (s for s in body.steps if isinstance(s, Apply) and s.bodies)
        program, body = program.nodes[call.node].bodies[0], call.bodies[0]
    own = (s for s in body.steps if isinstance(s, Reshard) and s.gathers_state)
    after = {program.leaf(s.source.value): s.after for s in own}
    assert after.keys() == {("up",), ("down",)} and after["up",] is None
    before = [
        step
        for step in body.steps
        if isinstance(step, Apply)
        and step.primitive == "dot_general"
        and after["down",] in step.operands
    ]
    assert len(before) == 1  # that with `o`


@pytest.mark.parametrize("balanced", [True, False])
def test_balanced_loops_stack_sums_last(balanced) -> None:
    with in_turn(balanced):
        case = sharded()
        forward, backward = (loop for _, loop in loops(case))
        jaxpr = jax.make_jaxpr(case.step)(case.state, case.batch).jaxpr
    assert not forward.stacks_last and backward.stacks_last == balanced
    scans = [e for e, *_ in walk(jaxpr) if e.primitive.name == "scan"]
    (scan,) = (e for e in scans if e.params["reverse"])
    body = scan.params["jaxpr"].jaxpr
    tied = [set(e.outvars) for e in body.eqns if e.primitive is barrier_p]
    stacked = set(body.outvars[compat.scan_counts(scan)[1] :])
    assert len(stacked) == len(state_of())
    assert any(stacked <= each for each in tied) == balanced


@pytest.mark.covering(2)
@pytest.mark.parametrize("remat", [True, False])
@pytest.mark.parametrize(("balanced", "least_part"), KINDS)
@pytest.mark.parametrize("devices", [8, 6])
def test_numbers_are_those_of_the_plain_step(
    devices, balanced, least_part, remat
) -> None:
    """Rows and widths that six devices do not divide, too."""
    state, batch = values(rows=48)
    with in_turn(balanced, least_part):
        case = sharded(remat, rows=48, devices=devices)
        assert order_gathers.orders_gathers(case.plan.body) == (least_part == 1)
        assert all(loop.ahead for _, loop in loops(case))
        options = {"stationary": False, "min_size": 0}
        assert_parity(
            plain_step(remat), cpu_mesh(devices), state, batch, steps=3, **options
        )


OPTIONS: dict[str, dict[str, Any]] = {
    "quantized": {"gather_dtype": {"o": "int8"}, "quantize_block": 4},
    "on the host": {"offload": {"q": "host"}},
    "within a bound": {"offload": "1GiB"},
    "together": {"bucket_bytes": 2**12},
    "kept": {"reshard_after_forward": False},
    "narrow": {"reduce_dtype": "float32", "gather_dtype": "bfloat16"},
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("balanced", "least_part"), KINDS)
def test_other_options_compose(balanced, least_part, name) -> None:
    options, (state, batch) = OPTIONS[name], values(rows=64)
    with in_turn(balanced, least_part):
        made = []
        for prefetch in (0, "auto"):
            case = sharded(prefetch=prefetch, **options)
            assert case.plan.wire_bytes  # it chooses what a bound leaves on the host
            stored, losses = case.step.shard(state), []
            for _ in range(3):
                stored, loss = case.step(stored, batch)
                losses.append(loss)
            made.append((case.step.unshard(stored), losses))
        # A bound within which the state fits leaves nothing on the host. What moves
        # quantized goes ahead in loops that compute for longer than they send.
        named = [options.get("offload", ())]
        named += [options.get("gather_dtype", ())] * balanced
        left = {leaf for each in named if isinstance(each, dict) for leaf in each}
        for program, loop in loops(case):
            found = ahead_of(program, loop)
            assert found.isdisjoint(left)
            if name == "quantized" and not balanced and least_part == 1:
                assert "o" in found
            assert found or "reshard_after_forward" in options
    for a, b in zip(*map(jax.tree.leaves, made), strict=True):
        np.testing.assert_array_equal(a, b)


def adapters(h: jax.Array, w: Any) -> tuple[jax.Array, None]:
    """Two small weights in front of the only large one."""
    return h + jnp.tanh(jnp.tanh(h @ w["a"]) @ w["b"]) @ w["c"], None


@jax.custom_vjp
def mlp(h: jax.Array, ws: jax.Array) -> jax.Array:
    for i in range(3):
        h = jnp.tanh(h @ ws[i])
    return h


mlp.defvjp(
    lambda h, ws: (mlp(h, ws), (h, ws)),
    lambda kept, g: jax.vjp(lambda h, ws: jnp.tanh(h @ ws[0]) @ ws[1], *kept)[1](g),
)


def custom(h: jax.Array, w: Any) -> tuple[jax.Array, None]:
    """Gathers are inside of a call that is left where nothing is differentiated."""
    return h + mlp(h @ w["a"], w["c"]), None


def sorted_first(h: jax.Array, w: Any) -> tuple[jax.Array, jax.Array]:
    """What is used last in products is read before all of them, for none of them."""
    least = jnp.sum(jnp.sort(w["down"], axis=0)[3])
    return layer(h, w)[0], least


LAYERS_OF = {
    "adapters": (adapters, {"a": (WIDTH, 4), "b": (4, WIDTH), "c": (WIDTH, WIDTH)}),
    "custom": (custom, {"a": (WIDTH, WIDTH), "c": (3, WIDTH, WIDTH)}),
    "sorted first": (sorted_first, {k: v[1:] for k, v in state_of().items()}),
}


@pytest.mark.covering(2)
@pytest.mark.parametrize("prefetch", ["auto", "first"])
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("kind", LAYERS_OF)
def test_layers_of_other_forms(kind, balanced, trains, prefetch) -> None:
    body, shapes = LAYERS_OF[kind]
    rng = np.random.default_rng(0)
    state = {
        name: (rng.standard_normal((LAYERS, *shape)) / 7).astype(np.float32)
        for name, shape in shapes.items()
    }
    batch = rng.standard_normal((64, WIDTH)).astype(np.float32)

    def loss_fn(state, x):
        h, others = lax.scan(body, x, state)
        return jnp.mean(h**2) + (0 if others is None else jnp.mean(others))

    def step(state, x):
        if not trains:
            return state, loss_fn(state, x)
        loss, grads = jax.value_and_grad(loss_fn)(state, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), loss

    options = {"stationary": False, "min_size": 0, "prefetch": prefetch}
    with in_turn(balanced):
        assert_parity(step, cpu_mesh(8), state, batch, steps=2, **options)


def test_what_stays_in_bits_passes_no_barrier() -> None:
    options = {"gather_dtype": {"q": "int8", "o": "int8"}, "quantize_block": 4}
    state, batch = values(rows=64)
    with in_turn(True):
        case = sharded(prefetch="first", **options)
        (_, backward) = loops(case)
        assert ahead_of(*backward) >= {"q", "o"}
        assert not any(each.handed for each in backward[1].ahead)
        stored, loss = case.step(case.step.shard(state), batch)
    assert np.isfinite(loss)
    assert jax.tree.structure(stored) == jax.tree.structure(state)


@pytest.mark.parametrize("remat", [True, False])
def test_what_is_kept_in_part_is_tied_too(remat) -> None:
    """The backward pass gathers what the forward pass has handed it."""
    with in_turn(False):
        _, (program, backward) = loops(sharded(remat, reshard_after_forward=2))
    (ahead,) = backward.ahead
    assert ahead.part.imports
    assert len({*ahead.tied}) == len(ahead_of(program, backward)) > 0


@pytest.mark.parametrize("remat", [True, False])
def test_what_waits_is_cast_before_it_does(remat) -> None:
    """A compiler makes no kernel of a slice and a cast on both sides of a barrier."""
    with in_turn(False):
        case = sharded(remat, dtype=jnp.bfloat16)
        passes = loops(case)
        jaxpr = jax.make_jaxpr(case.step)(case.state, case.batch).jaxpr
    for program, loop in passes:
        moved = [s for s in all_moves(loop.bodies[0]) if s.in_turn and len(s.path) == 1]
        assert {step.dtype for step in moved} == {"bfloat16"}
        assert len(moved) == len(ahead_of(program, loop)) > 0
    assert ahead_of(*passes[0]) == AHEAD
    sliced = {
        out
        for eqn, *_ in walk(jaxpr)
        if eqn.primitive.name == "dynamic_slice"
        for out in eqn.outvars
    }
    ties = [eqn for eqn, *_ in walk(jaxpr) if eqn.primitive is barrier_p]
    assert len(ties) > len(AHEAD) + 2  # those in front of a loop are in one
    assert not any(sliced & {*tie.invars} for tie in ties)


def test_without_a_large_sum_they_wait_for_a_product() -> None:
    """As of adapters beside frozen weights."""

    def step(state, x):
        def loss_fn(scales):
            return jnp.mean(lax.scan(layer, x, {**state["w"], **scales})[0] ** 2)

        grads = jax.grad(loss_fn)(state["scales"])
        scales = jax.tree.map(lambda w, g: w - 0.1 * g, state["scales"], grads)
        return {"w": state["w"], "scales": scales}, ()

    shapes = state_of()
    scales = {"scale": shapes.pop("scale")}
    with in_turn(True):
        state = {"w": shapes, "scales": scales}
        case = shard_fn(step, cpu_mesh(8), state, (64, WIDTH), stationary=False)
        _, (_, backward) = loops(case)
    assert backward.ahead
    assert all(each.tied and not each.handed for each in backward.ahead)


def test_what_more_is_asked_ahead_leaves_the_order_alone() -> None:
    with in_turn(False):
        case = sharded(prefetch={"up": 1, "*": "auto"})
        assert not order_gathers.orders_gathers(case.plan.body)
        assert all("up" in ahead_of(*each) for each in loops(case))


def test_the_first_gather_of_an_iteration_waits_for_nothing() -> None:
    with in_turn(False):
        (program, forward), _ = loops(sharded())
    waits = {
        program.leaf(step.source.value)[0]: step.after
        for step in forward.bodies[0].steps
        if isinstance(step, Reshard) and step.gathers_state
    }
    assert waits["up"] is None and waits["down"] is not None


def test_the_plan_says_why_and_what_it_sends() -> None:
    with in_turn(False):
        case = sharded()
        plan = case.plan
        compiled = case.step.lower(case.state, case.batch).compile()
    said = str(plan.explain("o"))
    assert "before the largest" in said and "prefetch='auto'" in said
    assert "limits.SUMS_FLOPS" in str(plan.explain("down"))
    gathers = [c for c in plan.collectives if c.op == "all_gather"]
    assert {c.times for c in gathers if c.path == "o"} == {LAYERS + 1}
    assert {c.times for c in gathers if c.path == "down"} == {LAYERS}
    assert plan.verify(compiled).ok


def test_what_waits_is_used_behind_its_barrier() -> None:
    """Of a barrier, a compiler drops what nothing uses, and with it the tie."""
    with in_turn(True):
        case = sharded()
        text = case.step.lower(case.state, case.batch).as_text()
    found = re.findall(r"(%\d+):2 = stablehlo.optimization_barrier", text)
    assert len(found) >= 2 * len(AHEAD)
    for tie in found:
        assert re.search(rf"{tie}#1\b", text) and re.search(rf"{tie}#0\b", text), tie


def planned_for(
    target: str, tokens: int = 4096, width: int = 8192, **options
) -> Sharded:
    mesh = targets.mesh(target)
    rows = mesh.size * tokens
    step = plain_step(dtype=jnp.bfloat16)
    return shard_fn(step, mesh, state_of(width, 4 * width), (rows, width), **options)


def compiled_for(target: str, tokens: int, **options) -> Any:
    case = planned_for(target, tokens, **options)
    return case.step.on(target, case.state, case.batch)


@pytest.mark.parametrize(
    ("target", "tokens"),
    [aot("h100:64", 2048), aot("h100:64", 4096, exhaustive=True), aot("h200:64", 4096)],
)
def test_the_compiled_step_waits_less(target, tokens) -> None:
    """Than with nothing ahead."""
    ahead = compiled_for(target, tokens)
    none = compiled_for(target, tokens, prefetch=0)
    assert ahead.verification.ok
    options = dict(ahead.compiler_options)
    assert options[IN_FLIGHT] == 8 and COMBINES in options
    assert ahead.exposed_seconds < 0.7 * none.exposed_seconds
    assert ahead.step_seconds < none.step_seconds


@pytest.mark.parametrize(
    ("target", "width"),
    [aot("h100:128", 2048), aot("h200:64", 1024, exhaustive=True)],
)
def test_what_small_parts_gather_ahead_is_compiled_as_planned(target, width) -> None:
    """What it saves in models of real depth, `benchmarks/first_gathers.py` prints."""
    case = planned_for(target, width=width)
    assert {c.path for c in case.plan.collectives if c.ahead} == {"scale", *"qkv"}
    assert not order_gathers.orders_gathers(case.plan.body)
    report = case.step.on(target, case.state, case.batch)
    assert report.verification.ok
    options = dict(report.compiler_options)
    assert options[IN_FLIGHT] == 5 and COMBINES not in options


@pytest.mark.parametrize("target", [aot("h100:8"), aot("b200:64")])
def test_gpus_of_one_host_and_later_ones_are_left_alone(target) -> None:
    lines = planned_for(target).plan.collectives
    assert not any(c.used_first and c.times > LAYERS for c in lines)
