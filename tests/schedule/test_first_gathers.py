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

import shardfn
from shardfn.analysis import targets

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


def square_norm(h, w):
    """The product of a norm has no weight, and hides no gather."""
    y = h * jax.lax.rsqrt(1e-3 + jnp.einsum("bi,bi->b", h, h))[:, None]
    return h + jnp.tanh(y @ w["q"]) @ w["o"]


def biased(h, w):
    return h + jnp.tanh(h @ w["q"] + w["norm"]) @ w["o"]


def parallel_at_once(h, w):
    y = h * w["norm"]
    a, b = y @ w["q"], y @ w["up"]
    return h + jnp.tanh(a) @ w["o"] + jnp.tanh(b) @ w["down"]


def elementwise(h, w):
    return h + jnp.tanh(h * w["norm"])


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
    square_norm: (MATRICES, {"q"}, {"q"}),
    biased: ({**MATRICES, "norm": (LAYERS, WIDTH)}, {"q"}, {"q"}),
    parallel_at_once: (
        {**MATRICES, **STATE["layers"], "norm": (LAYERS, WIDTH)},
        {"norm", "q", "up"},
        {"norm", "q", "up"},
    ),
    elementwise: ({"norm": (LAYERS, WIDTH)}, set(), set()),
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
    left = "gathered in its own iteration, whose first products do not use it"
    assert left in str(plan.explain("*/o")) and left not in str(plan.explain("*/q"))
    alone = sharded(attention, {"*/o": "first"}).plan  # of which none is first
    assert left in str(alone.explain("*/o")) and left not in str(alone.explain("*/up"))
    assert "prefetch: 'first'" in str(plan)


def test_unrolled_layers_are_left_alone() -> None:
    mesh = cpu_mesh(4)
    state = {"layers": [{"up": (16, 32), "down": (32, 16)}] * LAYERS, "head": (16, 8)}
    plans = [
        str(shard_fn(train("unrolled_remat"), mesh, state, ROWS, prefetch=asked).plan)
        for asked in ("first", "auto")
    ]
    assert plans[0].replace("\nprefetch: 'first'", "") == plans[1]


@pytest.mark.parametrize("value", ["last", True, -1, 1.0])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(
        shardfn.ShardingError, match="an integer that is not negative, 'first', 'auto'"
    ):
        sharded(attention, value)


LOOPS: dict[str, tuple[str, dict[str, Any]]] = {
    "kept within groups": ("scan_remat", {"reshard_after_forward": 2}),
    "kept": ("scan_remat", {"reshard_after_forward": False}),
    "together": ("scan_remat", {"bucket_bytes": 2**20}),
    "narrow": ("scan_remat", {"gather_dtype": "float16"}),
    "whole leaves": ("scan_remat", {"shard": {"*/k": False}}),
}


@pytest.mark.parametrize("name", LOOPS)
def test_it_goes_with_other_options(name: str) -> None:
    kind, options = LOOPS[name]
    case = sharded(attention, "first", kind, **options)
    assert ahead(case, "forward") & {"q", "v"} or name == "together"
    assert_moves_hold(case, merged=True)
    plain = sharded(attention, 0, kind, **options)
    jax.tree.map(np.testing.assert_array_equal, run(case), run(plain))


def test_each_remat_of_a_layer_and_loops_around_it() -> None:
    """Two remats in a layer, the second of which is behind products; backward and
    forward scans, microbatches around them, an unrolled loop and a layer alone."""

    def loss_fn(w, x):
        def layer(h, w):
            h = jax.checkpoint(lambda h: h + jnp.tanh(h @ w["q"]) @ w["k"])(h)
            return jax.checkpoint(lambda h: h + jnp.tanh(h @ w["v"]) @ w["o"])(h), None

        h, _ = lax.scan(layer, x, w, reverse=True)
        h, _ = lax.scan(layer, h, w, unroll=2)
        h, _ = lax.scan(layer, h, jax.tree.map(lambda a: a[:1], w))
        return jnp.mean(h**2)

    state = {name: (4, WIDTH, WIDTH) for name in "qkvo"}
    cases = []
    for asked in ("first", 0):
        step = descent(loss_fn, microbatches=2)
        options = {"prefetch": asked, "min_size": 0}
        cases.append(shard_fn(step, cpu_mesh(4), state, (16, WIDTH), **options))
    times, plain = (gathers(case.plan) for case in cases)
    more = {w: times[w]["forward"] - plain[w]["forward"] for w in state}
    assert more["q"] > 0 and more["k"] == more["v"] == more["o"] == 0
    jax.tree.map(np.testing.assert_array_equal, *map(run, cases))


@pytest.mark.aot("h100:8")
@pytest.mark.standard_promotion
def test_compilers_gather_as_often_as_planned_in_the_memory_of_these_weights() -> None:
    """Of 2 MiB the carried projection, of 16 the MLP, which stays in its layer."""

    def layer(h, w):
        w = {name: x.astype(jnp.bfloat16) for name, x in w.items()}
        h = h + jnp.tanh(h @ w["q"]) @ w["o"]
        return h + jnp.tanh(h @ w["up"]) @ w["down"], None

    def loss_fn(state, x):
        body = jax.checkpoint(layer, prevent_cse=False)
        h, _ = lax.scan(body, x.astype(jnp.bfloat16), state)
        return jnp.mean(h.astype(jnp.float32) ** 2)

    sizes = {"q": (1024, 1024), "o": (1024, 1024)}
    sizes |= {"up": (1024, 4096), "down": (4096, 1024)}
    state = {name: (8, *size) for name, size in sizes.items()}
    memory = []
    for asked in (0, "first"):
        mesh = targets.mesh("h100:8")
        case = shard_fn(descent(loss_fn), mesh, state, (512, 1024), prefetch=asked)
        program = case.compile()
        found = case.plan.verify(program)
        assert found.ok, str(found)
        memory.append(program.memory_analysis().temp_size_in_bytes / 2**20)
    times = {
        c.line.path: c.line.times for c in found.lines if c.line.op == "all_gather"
    }
    assert times == {"q": 9, "o": 8, "up": 8, "down": 8}
    assert memory[1] - memory[0] <= 3 * 2
