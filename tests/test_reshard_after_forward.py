"""In: scanned and unrolled models, with and without remat, and what is to be gathered
again. Out: exactly those gathers, in the plan and compiled, and the same bits.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from parity import quick_compiles as quick_compiles
from plan_helpers import (
    CPU_MERGES_GATHERS,
    Sharded,
    any_dtype,
    compiled_moves,
    cpu_mesh,
    emitted_moves,
    planned_moves,
    shard_fn,
)

import shardfn

LAYERS, WIDTH, HIDDEN = 3, 16, 32
STATE = {
    "layers": {"up": (LAYERS, WIDTH, HIDDEN), "down": (LAYERS, HIDDEN, WIDTH)},
    "head": (WIDTH, 8),
}
UNROLLED = STATE | {
    "layers": [{"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}] * LAYERS
}
ROWS = (16, WIDTH)
KINDS = ["scan", "scan_remat", "unrolled", "unrolled_remat"]


def train(kind: str, microbatches: int = 1) -> Callable[[Any, Any], Any]:
    """A step on `STATE`: residual layers in bfloat16, a head, plain descent."""

    def layer(h, w):
        up, down = (w[k].astype(jnp.bfloat16) for k in ("up", "down"))
        return h + jnp.tanh(h @ up) @ down, None

    if "remat" in kind:
        layer = jax.checkpoint(layer, prevent_cse="scan" not in kind)

    def loss_fn(state, x):
        h = x.astype(jnp.bfloat16)
        if "scan" in kind:
            h, _ = lax.scan(layer, h, state["layers"])
        else:
            for w in state["layers"]:
                h, _ = layer(h, w)
        return jnp.mean((h.astype(jnp.float32) @ state["head"]) ** 2)

    def step(state, x):
        def accumulate(grads, part):
            loss, more = jax.value_and_grad(loss_fn)(state, part)
            return jax.tree.map(jnp.add, grads, more), loss

        if microbatches == 1:
            loss, grads = jax.value_and_grad(loss_fn)(state, x)
        else:
            zeros = jax.tree.map(jnp.zeros_like, state)
            grads, loss = lax.scan(
                accumulate, zeros, x.reshape(microbatches, -1, WIDTH)
            )
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), loss

    return step


def sharded(kind: str, asked: Any, microbatches: int = 1, **options: Any) -> Sharded:
    state = STATE if "scan" in kind else UNROLLED
    return shard_fn(
        train(kind, microbatches),
        cpu_mesh(4),
        state,
        ROWS,
        reshard_after_forward=asked,
        **options,
    )


def gathers(plan: shardfn.Plan) -> dict[str, Counter[str]]:
    """Per leaf and phase, how often it is gathered in a step."""
    found: dict[str, Counter[str]] = {}
    for line in plan.collectives:
        if line.op == "all_gather":
            counts = found.setdefault(line.path.rpartition("/")[2], Counter())
            counts[line.phase] += line.times or 0
    return found


def run(case: Sharded, steps: int = 2) -> list[Any]:
    rng = np.random.default_rng(0)
    make = lambda s: rng.standard_normal(s.shape).astype(np.float32) / 4  # noqa: E731
    state, out = case.step.shard(jax.tree.map(make, case.state)), []
    for _ in range(steps):
        state, loss = case.step(state, make(case.batch))
        out.append(jax.device_get((state, loss)))
    return out


def assert_moves_hold(case: Sharded, kind: str) -> None:
    """What is planned is what JAX is given, and what is compiled."""
    assert emitted_moves(case) == planned_moves(case.plan)
    repeats = any(c["backward"] for c in gathers(case.plan).values())
    if repeats and CPU_MERGES_GATHERS:
        return
    compiled = any_dtype(compiled_moves(case.compile()))
    assert compiled == any_dtype(planned_moves(case.plan))


@pytest.mark.parametrize("kind", KINDS)
def test_gathers_of_each_choice(kind: str) -> None:
    """One per use and pass; the head's two uses, next to each other, share one."""
    n = LAYERS
    both, first = {"forward": n, "backward": n}, {"forward": n}
    kept, auto, again = (sharded(kind, asked) for asked in (False, "auto", True))
    assert gathers(kept.plan) == {"up": first, "down": first, "head": {"forward": 1}}
    assert gathers(again.plan)["head"] == {"forward": 1, "backward": 1}
    assert gathers(auto.plan)["head"] == {"forward": 1}
    # Without remat, the first layer's first weight is not needed to go further back.
    up = first | {"backward": n - 1} if kind == "unrolled" else both
    assert gathers(again.plan) | {"head": 0} == {"up": up, "down": both, "head": 0}
    saved = 2 * WIDTH * HIDDEN * (up["backward"] + n) + 4 * WIDTH * 8
    assert again.plan.wire_bytes - kept.plan.wire_bytes == saved * 3 // 4
    for case in (kept, again):
        assert_moves_hold(case, kind)
    results = run(kept), run(auto), run(again)
    jax.tree.map(np.testing.assert_array_equal, *results[:2])
    jax.tree.map(np.testing.assert_array_equal, *results[1:])


def test_patterns_choose_leaf_by_leaf() -> None:
    asked = {"layers/up": False, "head": True}
    plan = sharded("scan_remat", asked).plan
    found = gathers(plan)
    assert found["up"] == {"forward": LAYERS}
    assert found["down"] == {"forward": LAYERS, "backward": LAYERS}
    assert found["head"] == {"forward": 1, "backward": 1}
    text = "reshard_after_forward: False for layers/up, True for head"
    assert str(plan).endswith(text)


@pytest.mark.parametrize("kind", ["scan_remat", "unrolled"])
def test_a_kept_weight_leaves_the_loop_over_microbatches(kind: str) -> None:
    """The others are cast inside the loop, and so are gathered inside."""
    plan = sharded(kind, False, microbatches=4).plan
    found = gathers(plan)
    assert found["up"] == {"forward": 4 * LAYERS}
    assert found["head"] == {"forward": 1}
    assert gathers(sharded(kind, True, microbatches=4).plan)["head"] == {
        "forward": 4,
        "backward": 4,
    }


def test_a_step_without_a_backward_pass_keeps_nothing() -> None:
    def step(w, x):
        out, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)
        return w, out.sum()

    plans = [
        shard_fn(
            step, cpu_mesh(4), (3, 16, 16), (8, 16), reshard_after_forward=asked
        ).plan
        for asked in (True, False)
    ]
    assert plans[0].body == plans[1].body


def test_on_a_hybrid_mesh() -> None:
    step = train("scan_remat")
    case = shard_fn(
        step,
        cpu_mesh(2, 4),
        STATE,
        ROWS,
        axis=("replica", "data"),
        reshard_after_forward=False,
    )
    assert gathers(case.plan)["up"] == {"forward": LAYERS}
    assert_moves_hold(case, "scan_remat")
