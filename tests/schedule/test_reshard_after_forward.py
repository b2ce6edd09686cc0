"""In: scanned and unrolled models, with and without remat, and what is to be gathered
again. Out: exactly those gathers, in the plan and compiled, and the same bits.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from layered import HIDDEN, KINDS, LAYERS, ROWS, STATE, UNROLLED, WIDTH, train
from plan_helpers import (
    Sharded,
    assert_moves_hold,
    cpu_mesh,
    gathers,
    run,
    shard_fn,
)


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
    assert_moves_hold(kept)
    assert_moves_hold(again, merged=True)
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
    assert f"\n{text}\n" in str(plan)


@pytest.mark.parametrize("kind", ["scan_remat", "unrolled"])
def test_a_kept_weight_leaves_the_loop_over_microbatches(kind: str) -> None:
    """Also one that is cast in it; slices of a stack are gathered inside."""
    plan = sharded(kind, False, microbatches=4).plan
    found = gathers(plan)
    assert found["up"] == {"forward": (1 if kind == "unrolled" else 4) * LAYERS}
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
    assert_moves_hold(case)


def test_numbers_are_not_truth_values() -> None:
    """A group of one keeps all, True nothing; in Python they are equal."""
    plans = [sharded("scan", asked).plan for asked in (1, True, 1)]
    sent = [plan.wire_bytes for plan in plans]
    assert sent[0] == sent[2] < sent[1]
    assert gathers(plans[1])["head"] == {"forward": 1, "backward": 1}
