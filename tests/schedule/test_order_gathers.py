"""In: loops over layers that compute about as long as they send, and others, of which
nothing runs ahead. Out: their gathers begin in the order of their use, each behind a
product that is computed a while before its own; the sums of such a loop end in their
iteration, and stay apart.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import aot
from jax import lax
from plan_helpers import Sharded, cpu_mesh, shard_fn

from shardfn._core import compat
from shardfn._core.plan import Apply, BodyPlan, Reshard
from shardfn._core.program import Program
from shardfn._schedule import balanced_loops, first_uses, order_gathers, undelayed_sums
from shardfn.analysis import targets
from shardfn.analysis._hlo import read_collectives
from shardfn.testing import assert_same

LAYERS = 4
WIDTH = 1024
WIDE = 4
"""How much wider than the rest the inner layer is."""
COMBINES = "xla_gpu_reduce_scatter_combine_threshold_bytes"
NAMES = ("query", "key", "value", "out", "up", "down")


def layer(h: jax.Array, w: Any) -> tuple[jax.Array, None]:
    """Three products of one operand, one of theirs, and two one after the other."""

    def product(x: jax.Array, name: str) -> jax.Array:
        return x @ w[name].astype(x.dtype)

    query, key, value = (product(h, name) for name in NAMES[:3])
    h = h + product(jnp.tanh(query * key) + value, "out")
    return h + product(jnp.tanh(product(h, "up")), "down"), None


def train_step(remat: bool = True, dtype: Any = jnp.bfloat16, unroll: int = 1):
    body = jax.checkpoint(layer, prevent_cse=False) if remat else layer

    def loss_fn(state, x):
        h, _ = lax.scan(body, x.astype(dtype), state, unroll=unroll)
        return jnp.mean(h.astype(jnp.float32) ** 2)

    def step(state, x):
        loss, grads = jax.value_and_grad(loss_fn)(state, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), loss

    return step


def sharded(
    mesh: Any = None, rows: int = 16, width: int = WIDTH, wide: int = WIDE, **options
) -> Sharded:
    kinds = {k: options.pop(k) for k in ("remat", "dtype", "unroll") if k in options}
    state = dict.fromkeys(NAMES[:4], (LAYERS, width, width))
    state["up"] = (LAYERS, width, wide * width)
    state["down"] = (LAYERS, wide * width, width)
    mesh = cpu_mesh(8) if mesh is None else mesh
    options = {"prefetch": 0} | options
    return shard_fn(train_step(**kinds), mesh, state, (rows, width), **options)


def balanced(monkeypatch: pytest.MonkeyPatch, least: int = 1, most: int = 10**9):
    for module in (balanced_loops, undelayed_sums):
        monkeypatch.setattr(module, "SUMS_FLOPS", most)
        monkeypatch.setattr(module, "SUMS_PART", 1)
    monkeypatch.setattr(balanced_loops, "BALANCED_FLOPS", least)
    monkeypatch.setattr(balanced_loops, "BALANCED_BYTES", 1)
    monkeypatch.setattr(compat, "misjudges_network", lambda device: True)


def loops(case: Sharded) -> list[tuple[Program, BodyPlan]]:
    """The bodies of loops that gather weights, and of remats in them."""
    found = []

    def visit(program: Program, body: BodyPlan, in_loop: bool) -> None:
        gathers = [s for s in body.steps if isinstance(s, Reshard) and s.gathers_state]
        if in_loop and gathers:
            found.append((program, body))
        for step in body.steps:
            if isinstance(step, Apply):
                node = program.nodes[step.node]
                looped = in_loop or node.kind == "scan"
                for inner, plan in zip(node.bodies, step.bodies, strict=True):
                    visit(inner, plan, looped)

    states, batch = case.step._divide((case.state, case.batch), {})
    planned = case.step.programs.planned(*case.step.storage.leaves(states), batch)
    visit(planned.program, planned.body, False)
    return found


def waits(program: Program, body: BodyPlan) -> dict[str, str]:
    """What each gather waits for: the weight whose product, or whose gather, it is."""
    weights, products, found = {}, {}, {}
    for step in body.steps:
        if isinstance(step, Reshard):
            if step.gathers_state:
                name = program.leaf(step.source.value)[0].split("/")[-1]
                weights[step.result] = name
                if step.in_turn:
                    known = weights | products
                    found[name] = known[step.after]
            continue
        node = program.nodes[step.node]
        used = [weights[r] for r in step.operands if r in weights]
        made = [order_gathers.Ref(value) for value in node.outputs]
        if used and node.kind == "op":
            is_product = node.eqn.primitive.name == "dot_general"
            if is_product:
                products[made[0]] = f"after {used[0]}"
            else:
                weights.update(dict.fromkeys(made, used[0]))
    return found


IN_TURN = {
    "out": "after query",
    "up": "after value",
    "down": "after out",
}


@pytest.mark.parametrize("remat", [True, False])
def test_gathers_wait_for_products_before_theirs(remat, monkeypatch) -> None:
    balanced(monkeypatch)
    forward, backward = loops(sharded(remat=remat))
    assert waits(*forward) == IN_TURN
    found = waits(*backward)
    if remat:
        assert found == IN_TURN
    else:
        assert set(found) and set(found) < set(NAMES)


def test_loops_that_compute_longer_or_shorter_stay_as_they_are(monkeypatch) -> None:
    found = []
    # A device has two rows: two FLOPs for each byte of the forward pass's gathers, that
    # count three times, and 5.3 for each byte of a sum, as the last product is not
    # computed again.
    for least, most in [(1, 6), (1, 7), (6, 7), (7, 8), (8, 10**9)]:
        balanced(monkeypatch, least, most)
        found.append(sum(bool(waits(*each)) for each in loops(sharded())))
    assert found == [1, 2, 1, 0, 0]


@pytest.mark.parametrize("options", [{"prefetch": 1}, {"unroll": LAYERS}])
def test_what_runs_ahead_or_is_written_out_stays_as_it_is(options, monkeypatch) -> None:
    balanced(monkeypatch)
    assert not any(waits(*each) for each in loops(sharded(**options)))


def test_small_weights_move_as_they_did(monkeypatch) -> None:
    balanced(monkeypatch)
    assert not any(waits(*each) for each in loops(sharded(width=64)))
    monkeypatch.setattr(first_uses, "CHAINED_BYTES", 1)
    assert all(waits(*each) for each in loops(sharded(width=64)))


@pytest.mark.parametrize(("wide", "ordered"), [(4, True), (8, True), (9, False)])
def test_no_place_needs_more_than_its_share(wide, ordered, monkeypatch) -> None:
    balanced(monkeypatch)
    found = loops(sharded(wide=wide))
    assert [bool(waits(*each)) for each in found] == [ordered] * 2


def test_most_is_of_large_weights_and_parts(monkeypatch) -> None:
    wide = 2 * WIDTH * WIDE * WIDTH  # bytes, in bfloat16
    for name, most in [("BALANCED_BYTES", wide), ("SUMS_PART", wide // 8)]:
        for size in (most, most + 1):
            balanced(monkeypatch)
            monkeypatch.setattr(balanced_loops, name, size)
            found = [bool(waits(*each)) for each in loops(sharded())]
            assert found == [size == most] * 2


def test_the_plan_and_the_options_say_so(monkeypatch) -> None:
    case = sharded()
    assert not order_gathers.orders_gathers(case.plan.body)
    balanced(monkeypatch)
    case = sharded()
    assert order_gathers.orders_gathers(case.plan.body)
    said = str(case.plan.explain("down"))
    assert "begins in turn" in said and "limits.BALANCED_FLOPS" in said


def test_what_a_gather_waits_for_is_used_behind_the_barrier(monkeypatch) -> None:
    """Of a barrier, a compiler drops what nothing uses, and with it the tie."""
    balanced(monkeypatch)
    case = sharded()
    text = case.step.lower(case.state, case.batch).as_text()
    ties = re.findall(r"(%\d+):2 = stablehlo.optimization_barrier", text)
    gathers = [t for t in ties if re.search(rf'all_gather"\({t}#0\)', text)]
    assert len(gathers) == sum(len(waits(*each)) for each in loops(case))
    for tie in gathers:
        assert re.search(rf"{tie}#1\b", text), tie


def values(case: Sharded) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    state = {
        k: rng.standard_normal(s.shape, np.float32) / 7 for k, s in case.state.items()
    }
    return state, rng.standard_normal(case.batch.shape, np.float32)


@pytest.mark.parametrize("remat", [True, False])
def test_numbers_are_the_same_to_the_bit(remat, monkeypatch) -> None:
    monkeypatch.setattr(first_uses, "CHAINED_BYTES", 1)
    made = []
    for least in (1, 10**9):
        balanced(monkeypatch, least)
        case = sharded(remat=remat, dtype=jnp.float32, width=48)
        assert order_gathers.orders_gathers(case.plan.body) == (least == 1)
        state, batch = values(case)
        stored = case.step.shard(state)
        for _ in range(3):
            stored, loss = case.step(stored, batch)
        made.append((case.step.unshard(stored), loss))
    assert_same(*made, "in turn and not", tol=0)


@pytest.mark.parametrize("target", [aot("h100:64")])
def test_the_compiled_step_waits_less(target, monkeypatch) -> None:
    """And sends the same, of which no large sums are combined."""
    rows, width = 64 * 2048, 8192
    seconds, temporary, sums = [], [], []
    for least in (balanced_loops.BALANCED_FLOPS, 10**9):
        monkeypatch.setattr(balanced_loops, "BALANCED_FLOPS", least)
        mesh = targets.mesh(target)
        case = sharded(mesh, rows=rows, width=width)
        report = case.step.on(target, case.state, case.batch)
        assert report.verification.ok
        ordered = order_gathers.orders_gathers(case.plan.body)
        assert ordered == (least < 10**9)
        assert (COMBINES in dict(report.compiler_options)) == ordered
        compiled = case.step.lower(case.state, case.batch).compile()
        found = read_collectives(compiled.as_text())
        sums.append([c for c in found if c.op == "psum_scatter" and c.times > 1])
        seconds.append(report.step_seconds)
        temporary.append(report.memory.temporary)
    assert seconds[0] < seconds[1]
    assert temporary[0] < temporary[1]
    assert len(sums[0]) == len(NAMES)


@pytest.mark.parametrize("target", [aot("h200:64")])
def test_gpus_whose_network_the_compiler_knows_are_left_alone(target) -> None:
    case = sharded(targets.mesh(target), rows=64 * 2048, width=8192)
    assert not order_gathers.orders_gathers(case.plan.body)


@pytest.mark.parametrize("target", [aot("h100:64")])
def test_a_compiler_that_is_told_is_left_alone(target, monkeypatch) -> None:
    mesh, sizes = targets.mesh(target), {"rows": 64 * 2048, "width": 8192}
    assert order_gathers.orders_gathers(sharded(mesh, **sizes).plan.body)
    case = sharded(mesh, **sizes, latencies="predicted")
    assert not order_gathers.orders_gathers(case.plan.body)
    flag = "--xla_gpu_analytical_latency_estimator_options=nic_speed_gbps=50"
    monkeypatch.setenv("XLA_FLAGS", flag)
    assert not order_gathers.orders_gathers(sharded(mesh, **sizes).plan.body)
