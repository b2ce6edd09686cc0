"""In: steps that add up gradients in a scan, and how they are to. Out: what each
iteration and what the step as a whole moves; the sums of the plain step.
"""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from plan_helpers import (
    Sharded,
    compiled_moves,
    cpu_mesh,
    emitted_moves,
    planned_moves,
    shard_fn,
)

from shardfn._propagation import loop_carries

PARTS = 4
STATE = {"up": (16, 32), "down": (32, 16)}


def step(state, x):
    """Descends by the gradients of four microbatches."""

    def loss_fn(state, x):
        return jnp.sum((x @ state["up"]) @ state["down"])

    def accumulate(total, part):
        loss, grads = jax.value_and_grad(loss_fn)(state, part)
        return jax.tree.map(jnp.add, total, grads), loss

    zeros = jax.tree.map(jnp.zeros_like, state)
    grads, losses = lax.scan(accumulate, zeros, x.reshape(PARTS, -1, 16))
    return jax.tree.map(jnp.subtract, state, grads), losses


def sharded(accumulate: Any, *sizes: int) -> Sharded:
    axis = ("replica", "data") if len(sizes) > 1 else "data"
    mesh = cpu_mesh(*sizes)
    return shard_fn(step, mesh, STATE, (32, 16), axis=axis, accumulate=accumulate)


def sums(case: Sharded, leaf: str) -> dict[tuple[str, str], int]:
    """How often a step moves a leaf's gradient, by operation and mesh axis."""
    found: Counter[tuple[str, str]] = Counter()
    for line in case.plan.collectives:
        if line.path == leaf and line.op in ("psum_scatter", "all_reduce"):
            found[line.op, line.axis] += line.times or 0
    return dict(found)


def assert_exact(case: Sharded, integers: Any) -> None:
    """What is planned is compiled, and sums of integers are those of the plain step."""
    assert emitted_moves(case) == planned_moves(case.plan)
    assert compiled_moves(case.compile()) == planned_moves(case.plan)
    state = {k: integers(shape) for k, shape in STATE.items()}
    x = integers((32, 16))
    expected = jax.jit(step)(state, x)
    new, losses = case.step(case.step.shard(state), x)
    whole = case.step.unshard(new)
    jax.tree.map(np.testing.assert_array_equal, expected, (whole, losses))


@pytest.mark.parametrize("asked, times", [("scatter", PARTS), ("defer", 1)])
def test_one_axis(asked: str, times: int, integers) -> None:
    case = sharded(asked, 4)
    for leaf in STATE:
        assert sums(case, leaf) == {("psum_scatter", "data"): times}
    assert_exact(case, integers)


@pytest.mark.parametrize("asked, times", [("scatter", PARTS), ("defer", 1)])
def test_replicas_are_reduced_once(asked: str, times: int, integers) -> None:
    case = sharded(asked, 2, 4)
    for leaf in STATE:
        assert sums(case, leaf) == {
            ("psum_scatter", "data"): times,
            ("all_reduce", "replica"): 1,
        }
    assert_exact(case, integers)


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("asked, times", [("scatter", 2 * PARTS), ("defer", 1)])
def test_gradients_that_scanned_layers_stack(
    asked: str, times: int, remat: bool, integers
) -> None:
    """A scan over two layers inside of the scan over microbatches."""

    def layered(state, x):
        def layer(h, w):
            return h @ w, None

        def loss_fn(state, x):
            body = jax.checkpoint(layer, prevent_cse=False) if remat else layer
            return jnp.sum(lax.scan(body, x, state["w"])[0])

        def accumulate(total, part):
            grads = jax.grad(loss_fn)(state, part)
            return jax.tree.map(jnp.add, total, grads), None

        zeros = jax.tree.map(jnp.zeros_like, state)
        grads, _ = lax.scan(accumulate, zeros, x.reshape(PARTS, -1, 16))
        return jax.tree.map(jnp.subtract, state, grads), ()

    shapes = {"w": (2, 16, 16)}
    case = shard_fn(layered, cpu_mesh(4), shapes, (32, 16), accumulate=asked)
    assert sums(case, "w") == {("psum_scatter", "data"): times}
    assert compiled_moves(case.compile()) == planned_moves(case.plan)
    state, x = {"w": integers(shapes["w"])}, integers((32, 16))
    expected, _ = jax.jit(layered)(state, x)
    new, _ = case.step(case.step.shard(state), x)
    np.testing.assert_array_equal(expected["w"], case.step.unshard(new)["w"])


def test_what_cannot_be_split_is_reduced_once(monkeypatch) -> None:
    """Each device holds the whole sum either way."""
    monkeypatch.setattr(loop_carries, "LOOP_BYTES", 0)

    def biased(state, x):
        def loss_fn(state):
            far = jnp.tanh(state["bias"])
            return jnp.sum(lax.scan(lambda h, w: (h * w + far, None), x, state["w"])[0])

        grads = jax.grad(loss_fn)(state)
        return jax.tree.map(jnp.subtract, state, grads), ()

    shapes = {"w": (4, 7), "bias": (7,)}
    case = shard_fn(biased, cpu_mesh(4), shapes, (32, 7))
    assert sums(case, "bias") == {("all_reduce", "data"): 1}


def test_auto_defers_what_is_small_beside_one_gathered_weight(monkeypatch) -> None:
    size = 16 * 32 * 4
    for limit, times in ((size, 1), (size - 1, PARTS)):
        monkeypatch.setattr(loop_carries, "LOOP_BYTES", limit)
        case = sharded("auto", 4)
        assert sums(case, "up") == {("psum_scatter", "data"): times}


def test_patterns_choose_and_leave_room_for_the_others(monkeypatch) -> None:
    monkeypatch.setattr(loop_carries, "LOOP_BYTES", 16 * 32 * 4)
    case = sharded({"down": "defer"}, 4)
    assert sums(case, "up") == sums(case, "down") == {("psum_scatter", "data"): 1}
    case = sharded({"down": "scatter"}, 4)
    assert sums(case, "up") == {("psum_scatter", "data"): 1}
    assert sums(case, "down") == {("psum_scatter", "data"): PARTS}


def test_memory_of_deferred_gradients() -> None:
    """As whole gradients of one device, where scattered ones are shards."""
    temporary = {
        asked: sharded(asked, 8).compile().memory_analysis().temp_size_in_bytes
        for asked in ("scatter", "defer")
    }
    gradients = 2 * 16 * 32 * 4
    more = temporary["defer"] - temporary["scatter"]
    assert gradients // 2 <= more <= 2 * gradients
