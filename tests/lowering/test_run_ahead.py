"""In: loops of which gathers run ahead, some of values that are stored quantized, live
on the host, or are made with something that no argument is in. Out: each gather waits,
of what it moves and of nothing that it does not; the numbers are those of a plan in
which nothing runs ahead.
"""

from collections import Counter
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from loops_ahead import (
    AHEAD,
    LAYERS,
    WIDTH,
    ahead_of,
    in_turn,
    layer,
    loops,
    sharded,
    state_of,
    values,
)
from plan_helpers import Sharded, cpu_mesh, shard_fn, walk

import shardfn
from shardfn._schedule.bodies import all_moves

WAITING = [True, False]
"""Whether gathers ahead wait for a product, as between hosts."""


def jaxpr_of(case: Sharded) -> Any:
    return jax.make_jaxpr(case.step)(case.state, case.batch).jaxpr


def stored(reads: Any) -> Any:
    """Few integers, whose scales are larger than `quantize_leaves` makes them."""
    rng = np.random.default_rng(0)
    elements = rng.integers(-3, 4, (LAYERS, WIDTH, WIDTH)).astype(np.int8)
    scales = jnp.full((LAYERS, WIDTH, WIDTH // 4), 0.05, jnp.bfloat16)
    return shardfn.QuantizedLeaf(jnp.asarray(elements), scales, 4, reads)


@pytest.mark.parametrize("waiting", WAITING)
@pytest.mark.parametrize("reads", ["float32", "bfloat16"])
def test_what_is_stored_quantized_is_gathered_as_it_is(reads, waiting) -> None:
    """Not read and quantized again, which rounds otherwise."""

    def body(h, w):
        w = {k: v.dequantize(reads) if k == "q" else v for k, v in w.items()}
        return layer(h, w)

    def step(state, x):
        def loss_fn(k):
            h, _ = lax.scan(jax.checkpoint(body), x, {**state["frozen"], "k": k})
            return jnp.mean(h.astype(jnp.float32) ** 2)

        loss, grad = jax.value_and_grad(loss_fn)(state["k"])
        return {**state, "k": state["k"] - 0.1 * grad}, loss

    arrays, batch = values(rows=64)
    frozen = {k: v for k, v in arrays.items() if k not in "qk"}
    state = {"frozen": {**frozen, "q": stored(reads)}, "k": arrays["k"]}
    made = []
    for prefetch in (0, "auto" if waiting else 1):
        with in_turn(False) if waiting else nullcontext():
            sharded_step = shardfn.fully_shard(
                step, cpu_mesh(8), min_size=8, stationary=False, prefetch=prefetch
            )
            start = sharded_step.shard(state)
            lines = sharded_step.plan(start, batch).collectives
            jaxpr = jax.make_jaxpr(sharded_step)(start, batch).jaxpr
            after, loss = sharded_step(start, batch)
        ahead = {c.path for c in lines if c.ahead}
        assert any("frozen/q" in path for path in ahead) == bool(prefetch)
        assert not any(eqn.primitive.name == "round" for eqn, *_ in walk(jaxpr))
        made.append((sharded_step.unshard(after), loss))
    for a, b in zip(*map(jax.tree.leaves, made), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("waiting", WAITING)
def test_what_lives_on_the_host_is_copied_once(waiting, dtype) -> None:
    """For each pass of each iteration, for the one ahead of them, and to be updated."""
    prefetch: Any = {"q": "first", "*": "auto"} if waiting else 1
    with in_turn(False) if waiting else nullcontext():
        case = sharded(dtype=dtype, prefetch=prefetch, offload={"q": "host"})
        assert all("q" in ahead_of(*each) for each in loops(case))
        jaxpr = jaxpr_of(case)
    copies, moved, made = 0, Counter[str](), dict[Any, str]()
    for eqn, times, *_ in walk(jaxpr):
        made |= dict.fromkeys(eqn.outvars, eqn.primitive.name)
        if eqn.primitive.name == "device_put":
            copies += times * ("Device" in str(eqn.params["devices"]))
        if eqn.primitive.name.startswith("all_gather"):
            moved[made.get(eqn.invars[0], "argument")] += times
    gathered = sum(c.times for c in case.plan.collectives if c.path == "q" and c.ahead)
    assert gathered >= LAYERS + 1
    to_device = [c for c in case.plan.transfers if c.memory == "device"]
    assert copies == sum(c.blocks for c in to_device)
    if waiting:
        assert "device_put" not in moved


def masked(h: jax.Array, w: Any) -> tuple[jax.Array, None]:
    """A weight of which a mask is left that no argument is in."""
    return layer(h, {**w, "o": w["o"] * jnp.tril(jnp.ones((WIDTH, WIDTH)))})


def twice(h: jax.Array, w: Any) -> tuple[jax.Array, None]:
    """A weight that two products read, one of them transposed."""
    return layer(h + jnp.tanh(h @ w["q"]) @ w["q"].T, w)


def handed_down(h: jax.Array, w: Any) -> tuple[jax.Array, None]:
    """The same mask, made outside of a remat that is given it, and a literal."""

    def inner(h: jax.Array, w: Any, mask: jax.Array, half: jax.Array) -> jax.Array:
        return layer(h, {**w, "o": w["o"] * mask * half})[0]

    mask = jnp.tril(jnp.ones((WIDTH, WIDTH)))
    return jax.checkpoint(inner, prevent_cse=False)(h, w, mask, 0.5), None


@pytest.mark.parametrize("remat", [True, False])
@pytest.mark.parametrize("body", [masked, twice, handed_down])
def test_all_that_runs_ahead_waits(body, remat) -> None:
    body = jax.checkpoint(body, prevent_cse=False) if remat else body

    def step(state, x):
        def loss_fn(state):
            return jnp.mean(lax.scan(body, x, state)[0] ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), loss

    with in_turn(False):
        options = {"stationary": False}
        case = shard_fn(step, cpu_mesh(8), state_of(), (64, WIDTH), **options)
        found, jaxpr = loops(case), jaxpr_of(case)
    made = dict[Any, str]()
    for eqn, times, *_ in walk(jaxpr):
        made |= dict.fromkeys(eqn.outvars, eqn.primitive.name)
        if eqn.primitive.name.startswith("all_gather") and times == 1:
            assert made[eqn.invars[0]] == "barrier", "in front of a loop"
    for _, loop in found:
        for each in loop.ahead:
            gathers = [m for m in all_moves(each.part) if m.gathers_state]
            assert len({m.source for m in gathers}) == len(each.tied) > 0
    assert sum(len(each.tied) for each in found[0][1].ahead) == len(AHEAD)
