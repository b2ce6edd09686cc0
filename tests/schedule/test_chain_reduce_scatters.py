"""In: unrolled models of true widths, and of tiny ones. Out: one gradient's
reduce-scatter after the other, and no more memory than a layer needs.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plan_helpers import cpu_mesh, emitted_moves, planned_moves, shard_fn
from test_reshard_after_forward import ROWS, UNROLLED, run, train as tiny

from shardfn._core import compat
from shardfn._core.plan import Apply, BodyPlan, Ref, Reshard
from shardfn._core.sharding import Unreduced
from shardfn._schedule import chain_reduce_scatters
from shardfn.analysis import targets
from shardfn.analysis._heap_size import compiled_with_heap

LAYERS, WIDTH, HIDDEN = 4, 1024, 4096
LAYER = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH), "bias": (HIDDEN,)}


def train(remat: bool):
    """Residual layers in bfloat16, one after the other, and plain descent."""

    def layer(h, w):
        up, down, bias = (w[k].astype(jnp.bfloat16) for k in ("up", "down", "bias"))
        return h + jnp.tanh(h @ up + bias) @ down

    def loss_fn(state, x):
        h = x.astype(jnp.bfloat16)
        for w in state:
            h = (jax.checkpoint(layer) if remat else layer)(h, w)
        return jnp.mean(h.astype(jnp.float32) ** 2)

    def step(state, x):
        grads = jax.grad(loss_fn)(state, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), ()

    return step


def sums(body: BodyPlan, names: dict[Ref, Any]) -> Iterator[tuple[Any, Any, int]]:
    """Of each sum: what it makes, what it waits for, and its elements. Bodies' versions
    go by those outside."""
    for step in body.steps:
        if isinstance(step, Reshard):
            if any(isinstance(s, Unreduced) for s in step.path[0]):
                after = step.after and names.get(step.after, step.after)
                yield names.get(step.result, step.result), after, np.prod(step.shape)
        elif step.bodies:
            yield from sums(step.bodies[0], inside(step))


def inside(step: Apply) -> dict[Ref, Any]:
    (body,) = step.bodies
    imports = dict(zip(body.imports, step.imports, strict=True))
    return imports | dict(zip(body.exports, step.exports, strict=True))


@pytest.mark.standard_promotion
def test_each_large_gradient_waits_for_the_one_before() -> None:
    case = shard_fn(train(True), cpu_mesh(8), [LAYER] * LAYERS, (16, WIDTH))
    found = list(sums(case.plan.body, {}))
    large = [(made, after) for made, after, size in found if size > HIDDEN]
    small = [after for _, after, size in found if size <= HIDDEN]
    assert len(large) == 2 * LAYERS and len(small) == LAYERS
    assert all(small[1:]), "or one could be combined with an early link"
    assert large[0][1] is None and all(after for _, after in large[1:])
    # Of a remat's two, the second goes by a name outside, and the next first waits.
    assert [after for _, after in large[2::2]] == [made for made, _ in large[1:-1:2]]
    assert emitted_moves(case) == planned_moves(case.plan)


@pytest.mark.standard_promotion
def test_without_remat_activations_outweigh_gradients() -> None:
    case = shard_fn(train(False), cpu_mesh(8), [LAYER] * LAYERS, (16, WIDTH))
    assert not any(after for _, after, _ in sums(case.plan.body, {}))


def test_the_order_changes_no_bit(monkeypatch) -> None:
    results = []
    for least in (0, 2**40):
        monkeypatch.setattr(chain_reduce_scatters, "CHAINED_BYTES", least)
        exact = {"xla_allow_excess_precision": False}
        options = dict(compiler_options=exact)
        case = shard_fn(tiny("unrolled_remat"), cpu_mesh(4), UNROLLED, ROWS, **options)
        waits = [after for _, after, _ in sums(case.plan.body, {})]
        assert any(waits) == (least == 0)
        results.append(run(case, 1))
    jax.tree.map(np.testing.assert_array_equal, *results)


def waiting_layers(case: Any) -> Iterator[bool]:
    """Of each layer in the backward pass, whether what it begins with waits for the
    last large gradient of the layer before."""
    last, ties = None, dict[Ref, Any]()
    for step in case.plan.body.steps:
        if isinstance(step, Reshard) and len(step.path) == 1 and step.after:
            ties[step.result] = step.after
        elif isinstance(step, Apply) and step.exports:
            yield any(last and ties.get(ref) == last for ref in step.operands if ref)
            last = step.exports[-1]


@pytest.mark.standard_promotion
def test_layers_wait_where_the_compiler_lets_sums_wait(monkeypatch) -> None:
    shapes = [LAYER] * LAYERS, (16, WIDTH)
    case = shard_fn(train(True), cpu_mesh(8), *shapes)
    assert list(waiting_layers(case)) == [False] * LAYERS
    monkeypatch.setattr(compat, "lets_sums_wait", lambda platform: True)
    case = shard_fn(train(True), cpu_mesh(8), *shapes)
    assert list(waiting_layers(case)) == [False, *[True] * (LAYERS - 1)]
    assert emitted_moves(case) == planned_moves(case.plan)


def test_layers_that_wait_change_no_bit(monkeypatch) -> None:
    monkeypatch.setattr(chain_reduce_scatters, "CHAINED_BYTES", 0)
    results = []
    for waits in (True, False):
        monkeypatch.setattr(compat, "lets_sums_wait", lambda platform, w=waits: w)
        exact = {"xla_allow_excess_precision": False}
        options = dict(compiler_options=exact)
        case = shard_fn(tiny("unrolled_remat"), cpu_mesh(4), UNROLLED, ROWS, **options)
        assert any(waiting_layers(case)) == waits
        results.append(run(case, 1))
    jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.aot("tpu:v5p:2x2x2")
@pytest.mark.standard_promotion
def test_a_tpu_holds_one_layers_gradients(monkeypatch) -> None:
    """Libtpu sums the gradients of several layers after these, one after the other."""
    heaps, width, hidden = {}, WIDTH // 2, HIDDEN // 2
    layer = {"up": (width, hidden), "down": (hidden, width), "bias": (hidden,)}
    for waits in (True, False):
        monkeypatch.setattr(compat, "lets_sums_wait", lambda platform, w=waits: w)
        mesh, state = targets.mesh("tpu:v5p:2x2x2"), [layer] * LAYERS
        case = shard_fn(train(True), mesh, state, (16384, width))
        lowered = case.step.lower(case.state, case.batch)
        _, heaps[waits] = compiled_with_heap(lowered, "tpu")
    gradients = 2 * 2 * width * hidden
    assert heaps[False] - heaps[True] > (LAYERS - 2) * gradients


@pytest.mark.aot("h100:8")
@pytest.mark.standard_promotion
def test_unrolled_layers_with_remat_are_whole_one_at_a_time() -> None:
    """XLA for GPUs would sum all gradients at once, at the end of the step."""
    temporary = {}
    for again in (True, False):
        mesh, state = targets.mesh("h100:8"), [LAYER] * LAYERS
        options = dict(reshard_after_forward=again)
        case = shard_fn(train(True), mesh, state, (512, WIDTH), **options)
        compiled = case.compile()
        assert case.plan.verify(compiled).ok
        temporary[again] = compiled.memory_analysis().temp_size_in_bytes
    layer = 2 * 2 * WIDTH * HIDDEN
    assert temporary[True] < 4 * layer
    assert temporary[False] - temporary[True] > (LAYERS - 3) * layer
