"""In: models with scanned layers, and how many layers ahead to gather. Out: the gathers
in the loop's carry, as often as the plan says, the same bits, and the memory stated.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from layered import LAYERS, ROWS, STATE, train
from plan_helpers import (
    Sharded,
    assert_moves_hold,
    cpu_mesh,
    emitted_moves,
    gathers,
    planned_moves,
    run,
    shard_fn,
    walk,
)

from shardfn._schedule import narrow_stacks
from shardfn.analysis import targets


def sharded(kind: str, prefetch: Any, **options: Any) -> Sharded:
    mesh = cpu_mesh(4)
    return shard_fn(train(kind), mesh, STATE, ROWS, prefetch=prefetch, **options)


def loops(case: Sharded) -> list[tuple[Any, list[str]]]:
    """Every scan and the primitives in its body, not in remats in it."""
    found = []
    for eqn, *_ in walk(case.local):
        if eqn.primitive.name == "scan":
            body = eqn.params["jaxpr"]
            eqns = getattr(body, "jaxpr", body).eqns
            found.append((eqn, [e.primitive.name for e in eqns]))
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["scan", "scan_remat"])
@pytest.mark.parametrize("asked", [1, 2, 9])
def test_gathers_run_ahead_of_their_layer(kind: str, asked: int) -> None:
    """By no more layers than follow the first."""
    case, plain = sharded(kind, asked), sharded(kind, 0)
    lead = min(asked, LAYERS - 1)
    times = {"forward": LAYERS + lead, "backward": LAYERS + lead}
    found = gathers(case.plan)
    assert found["up"] == found["down"] == times
    assert found["head"] == gathers(plain.plan)["head"]
    assert_moves_hold(case, merged=True)
    for eqn, primitives in loops(case):
        name = "all_gather_invariant"
        whole = [v.aval.shape for v in eqn.outvars if v.aval.shape in SHAPES]
        assert primitives.count(name) == 2, "outside of the remat"
        assert len(whole) == 2 * lead, "carried"
    jax.tree.map(np.testing.assert_array_equal, run(case), run(plain))


SHAPES = {shape[1:] for shape in STATE["layers"].values()}


def test_patterns_choose_their_own_lead() -> None:
    case = sharded("scan_remat", {"*/up": 2, "*/down": 1})
    found = gathers(case.plan)
    assert found["up"]["forward"] == LAYERS + 2
    assert found["down"]["backward"] == LAYERS + 1
    assert emitted_moves(case) == planned_moves(case.plan)
    plain = sharded("scan_remat", 0)
    jax.tree.map(np.testing.assert_array_equal, run(case, 1), run(plain, 1))


def test_what_is_kept_is_not_gathered_ahead_again() -> None:
    case = sharded("scan_remat", 1, reshard_after_forward=False)
    assert gathers(case.plan)["up"] == {"forward": LAYERS + 1}
    assert_moves_hold(case)
    plain = sharded("scan_remat", 0)
    jax.tree.map(np.testing.assert_array_equal, run(case, 1), run(plain, 1))


def test_what_depends_on_the_carry_is_gathered_in_its_iteration() -> None:
    def step(w, x):
        def body(carry, layer):
            x, shift = carry
            return (jnp.tanh(x @ (layer + shift)), shift * 2), None

        (x, _), _ = lax.scan(body, (x, jnp.ones((16, 16))), w)
        return w, x.sum()

    case = shard_fn(step, cpu_mesh(4), (3, 16, 16), (8, 16), prefetch=1)
    (line,) = [c for c in case.plan.collectives if c.op == "all_gather"]
    assert line.times == 3


@pytest.mark.parametrize("lead", [1, 2])
def test_memory_grows_by_the_layers_that_are_ahead(lead: int) -> None:
    """Each loop carries `lead` layers' weights; only one loop runs at a time."""
    temporary = [
        sharded("scan_remat", ahead).compile().memory_analysis().temp_size_in_bytes
        for ahead in (0, lead)
    ]
    layer = sum(2 * a * b for a, b in SHAPES)
    grown = temporary[1] - temporary[0]
    assert lead * layer // 2 <= grown <= 3 * (lead + 1) * layer


UNITS = {"up": (8, 1024, 4096), "down": (8, 4096, 1024)}
"""Layers of a true width, each 16 MiB of gathered weights."""


def compiled(asked: int, length: int = 8, unroll: int = 1) -> tuple[Any, float]:
    """Scanned layers with remat for 8 H100s: what verifies the gathers, and MiB."""

    def layer(h, w):
        up, down = (w[k].astype(jnp.bfloat16) for k in ("up", "down"))
        return h + jnp.tanh(h @ up) @ down, None

    def loss_fn(state, x):
        body = jax.checkpoint(layer, prevent_cse=False)
        h, _ = lax.scan(body, x.astype(jnp.bfloat16), state, unroll=unroll)
        return jnp.mean(h.astype(jnp.float32) ** 2)

    def step(state, x):
        grads = jax.grad(loss_fn)(state, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), ()

    state = {name: (length, *shape[1:]) for name, shape in UNITS.items()}
    mesh = targets.mesh("h100:8")
    case = shard_fn(step, mesh, state, (512, 1024), prefetch=asked)
    program = case.compile()
    temporary = program.memory_analysis().temp_size_in_bytes
    return case.plan.verify(program), temporary / 2**20


@pytest.mark.aot("h100:8")
@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    "asked, length, unroll, gathers",
    [(2, 4, 1, 6), (3, 2, 1, 3), (2, 5, 2, 7), (2, 3, 3, 3)],
)
def test_compilers_gather_as_often_as_planned(
    asked: int, length: int, unroll: int, gathers: int
) -> None:
    """Also if fewer layers follow than are asked for, if iterations are left over when
    the loop is unrolled, and if no loop is left."""
    found, _ = compiled(asked, length, unroll)
    assert found.ok, str(found)
    lines = [c.line for c in found.lines if c.line.op == "all_gather"]
    assert {(line.phase, line.times) for line in lines} == {
        ("forward", gathers),
        ("backward", gathers),
    }


@pytest.mark.aot("h100:8")
@pytest.mark.standard_promotion
def test_memory_on_gpus_grows_by_the_layers_that_are_ahead(monkeypatch) -> None:
    """By their gathered weights, 16 MiB, and at the first one by what XLA copies. Where
    stacks are in bfloat16, it takes less in all cases, but not equally less."""
    monkeypatch.setattr(narrow_stacks, "NARROW_STACKS", 1)
    none, one, two = (compiled(asked)[1] for asked in (0, 1, 2))
    assert 16 <= one - none <= 2.4 * 16
    assert 16 <= two - one <= 1.6 * 16


def test_activations_come_from_the_host_ahead() -> None:
    """Those that the step's own `jax.checkpoint` policy copies there."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["h"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def step(w: jax.Array, x: jax.Array) -> Any:
        def layer(h: jax.Array, w: jax.Array) -> Any:
            return jnp.tanh(checkpoint_name(h, "h") @ w), None

        def loss(w: jax.Array) -> jax.Array:
            layers = jax.checkpoint(layer, policy=policy, prevent_cse=False)
            return jnp.sum(lax.scan(layers, x, w)[0])

        return w - 0.1 * jax.grad(loss)(w), 0.0

    made = []
    for lead in (0, 1):
        case = shard_fn(step, cpu_mesh(4), (LAYERS, 16, 16), (8, 16), prefetch=lead)
        _, (backward, primitives) = loops(case)
        assert primitives.count("device_put") == lead, "in the remat, or ahead of it"
        shapes = [v.aval.shape for v in backward.outvars]
        assert shapes.count((2, 16)) == 1 + lead, "and of `h`"
        made.append(run(case))
    jax.tree.map(np.testing.assert_array_equal, *made)
