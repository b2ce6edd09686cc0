"""In: scanned layers of several forms, and `prefetch="first"`. Out: what an iteration
uses before it multiplies products is gathered an iteration ahead, nothing else is, as
often as planned, and the bits are the same.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from layered import LAYERS, ROWS, STATE, descent, layered_loss, train
from plan_helpers import (
    Sharded,
    assert_moves_hold,
    cpu_mesh,
    gathers,
    run,
    shard_fn,
)

WIDTH = 16


def attention(h, w):
    y = h * w["norm"]
    q, k, v = (y @ w[name] for name in "qkv")
    scores = jax.nn.softmax(jnp.einsum("bi,bj->bij", q, k))
    h = h + jnp.einsum("bij,bj->bi", scores, v) @ w["o"]
    return h + jnp.tanh(h @ w["up"]) @ w["down"]


def parallel(h, w):
    """As GPT-J's: attention and MLP read the same, one after the other."""
    y = h * w["norm"]
    return h + jnp.tanh(y @ w["q"]) @ w["o"] + jnp.tanh(y @ w["up"]) @ w["down"]


def late(h, w):
    """`k` is for an input of the step, as keys of cross attention are, but late."""
    q = h @ w["q"]
    scores = jnp.einsum("bi,bi->b", q, q)
    return h + scores[:, None] * (jnp.ones_like(h) @ w["k"])


def chunked(h, w):
    """The products of a chunk are in a loop of its own."""

    def chunk(total, y):
        return total + (y @ w["q"]).sum(), None

    total, _ = lax.scan(chunk, jnp.zeros((), h.dtype), jnp.stack([h, 2 * h]))
    return h + total * (h @ w["k"]) @ w["o"]


def single(h, w):
    return jnp.tanh(h @ w["q"])


MATRICES = dict.fromkeys("qkvo", (LAYERS, WIDTH, WIDTH))
FORMS: dict[Any, tuple[dict[str, tuple[int, ...]], set[str], set[str]]] = {
    # What forward takes ahead, and what backward does, which repeats the layer.
    attention: (
        {**MATRICES, **STATE["layers"], "norm": (LAYERS, WIDTH)},
        {"norm", "q", "k", "v"},
        {"norm", "q", "k", "v"},
    ),
    parallel: (
        {**MATRICES, **STATE["layers"], "norm": (LAYERS, WIDTH)},
        {"norm", "q"},
        {"norm", "q", "up"},  # what `o` makes is not repeated
    ),
    late: (MATRICES, {"q"}, {"q"}),
    chunked: (MATRICES, {"q", "k"}, {"q", "k"}),
    single: (MATRICES, {"q"}, {"q"}),
}


def sharded(form: Any, asked: Any, kind: str = "scan_remat", **options: Any) -> Sharded:
    state = {"layers": FORMS[form][0], "head": STATE["head"]}
    loss = layered_loss(kind, form, lambda state, h: h @ state["head"])
    mesh = cpu_mesh(4)
    options = {"min_size": 0, **options}
    return shard_fn(descent(loss), mesh, state, ROWS, prefetch=asked, **options)


def ahead(case: Sharded, phase: str) -> set[str]:
    """Leaves of layers that are gathered once more than there are layers."""
    times = gathers(case.plan)
    found = {name: n.get(phase, 0) for name, n in times.items() if name != "head"}
    assert set(found.values()) <= {0, LAYERS, LAYERS + 1}
    return {name for name, n in found.items() if n > LAYERS}


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
def test_what_a_layer_uses_first_is_gathered_ahead(form: Any) -> None:
    case, plain = sharded(form, "first"), sharded(form, 0)
    _, forward, backward = FORMS[form]
    assert ahead(case, "forward") == forward
    assert ahead(case, "backward") == backward
    assert ahead(plain, "forward") == ahead(plain, "backward") == set()
    assert_moves_hold(case, merged=True)
    jax.tree.map(np.testing.assert_array_equal, run(case), run(plain))


def test_backward_begins_with_the_last_weights_where_nothing_is_repeated() -> None:
    case = sharded(attention, "first", "scan", reshard_after_forward=True)
    assert ahead(case, "forward") == {"norm", "q", "k", "v"}
    assert ahead(case, "backward") == {"down"}
    plain = sharded(attention, 0, "scan", reshard_after_forward=True)
    jax.tree.map(np.testing.assert_array_equal, run(case), run(plain))


@pytest.mark.parametrize(
    "asked, expected",
    [
        ({"*/k": "first", "*/up": "first"}, {"k"}),
        ({"*/up": 1, "*": "first"}, {"norm", "q", "k", "v", "up"}),
        ({"*/up": 0, "*/q": 0, "*": "first"}, {"norm", "k", "v"}),
    ],
)
def test_patterns_choose_among_them(asked: Any, expected: set[str]) -> None:
    case = sharded(attention, asked)
    assert ahead(case, "forward") == ahead(case, "backward") == expected


def test_the_plan_says_why() -> None:
    plan = sharded(attention, "first").plan
    asks = "gathered ahead, as prefetch='first' asks"
    assert asks in str(plan.explain("*/q")) and asks not in str(plan.explain("*/o"))
    assert "prefetch: 'first'" in str(plan)


def test_unrolled_layers_are_left_alone() -> None:
    mesh = cpu_mesh(4)
    state = {"layers": [{"up": (16, 32), "down": (32, 16)}] * LAYERS, "head": (16, 8)}
    plans = [
        str(shard_fn(train("unrolled_remat"), mesh, state, ROWS, prefetch=asked).plan)
        for asked in ("first", 0)
    ]
    assert plans[0].replace("\nprefetch: 'first'", "") == plans[1]


@pytest.mark.parametrize("value", ["last", True, -1, 1.0])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(Exception, match="an integer that is not negative, 'first'"):
        sharded(attention, value)
