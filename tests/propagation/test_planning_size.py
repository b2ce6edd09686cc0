"""In: steps of two sizes. Out: planning the larger one calls hardly more functions of
the library than its size says: nothing recurses twice, or goes through all for each.
"""

import functools
import itertools
import os.path
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from plan_helpers import cpu_mesh

import shardfn

ROOT = os.path.dirname(shardfn.__file__)
W = jax.ShapeDtypeStruct((16, 16), jnp.float32)
LOW = jax.ShapeDtypeStruct((16, 16), jnp.bfloat16)

Case = tuple[Callable[..., Any], Any, dict[str, Any]]


def trained(loss: Callable[..., Any], state: Any, **options: Any) -> Case:
    def step(state, x):
        value, grads = jax.value_and_grad(loss)(state, x)
        return jax.tree.map(lambda p, g: p - g, state, grads), value

    return step, state, options


def layers(params, x):
    for w in params:
        x = x + jnp.tanh(x @ w)
    return jnp.mean(x**2)


def unrolled(n: int, **options: Any) -> Case:
    return trained(layers, [W] * n, **options)


def rematted(n: int) -> Case:
    def loss(params, x):
        for w in params:
            x = jax.checkpoint(lambda x, w: x + jnp.tanh(x @ w))(x, w)
        return jnp.mean(x**2)

    return trained(loss, [W] * n)


def diamonds(n: int) -> Case:
    """Linear operations whose operands meet again."""

    def step(w, x):
        g = jax.grad(lambda w: jnp.sum((x @ w).astype(jnp.float32)))(w)
        for _ in range(n):
            g = g * jnp.bfloat16(0.5) + g.T * jnp.bfloat16(0.5)
        return w - g, ()

    return step, LOW, {"reduce_dtype": "float32"}


def averaged_sums(n: int) -> Case:
    """The same in a step written per device: sums of what a sum made."""

    def step(w, x):
        g = jax.grad(lambda w: jnp.mean((x @ w) ** 2) + jnp.sum(w**2))(w)
        for _ in range(n):
            g = g + g
        return w - lax.pmean(g, "data"), ()

    return step, W, {}


def microbatches(n: int) -> Case:
    """A loop with a constant for every layer."""

    def step(params, x):
        def add(sums, x):
            return jax.tree.map(jnp.add, sums, jax.grad(layers)(params, x)), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        sums, _ = lax.scan(add, zeros, x.reshape(2, 8, 16))
        return jax.tree.map(jnp.subtract, params, sums), ()

    return step, [W] * n, {}


def joined(n: int) -> Case:
    """One operation on every leaf, and its derivative with as many results."""
    return trained(lambda p, x: jnp.mean((x @ jnp.concatenate(p, 1)) ** 2), [W] * n)


def taken_apart(n: int) -> Case:
    wide = jax.ShapeDtypeStruct((16, 16 * n), jnp.float32)
    return trained(lambda p, x: layers(jnp.split(p, n, axis=1), x), wide)


def handed_on(n: int) -> Case:
    """Each product wants its second factor split once its first one is: as many rounds
    as products."""

    def step(state, x):
        made = [jnp.sin(jnp.full((16, 16), state + i)) for i in range(n)]
        out = (x * made[0]).sum()
        for one, other in itertools.pairwise(made):
            out = out + jnp.tanh(one * other).sum()
        return state, out

    return step, jax.ShapeDtypeStruct((), jnp.float32), {}


def experts(n: int) -> Case:
    """A leaf per expert, of which all stay: what was found of the leaves that are
    updated together, and of dimensions, is for all of them."""

    def loss(params, x):
        gates, y = jax.nn.softmax(x @ params["router"]), x
        for i, (up, down) in enumerate(params["experts"]):
            y = y + gates[:, i : i + 1] * (jnp.tanh(x @ up) @ down)
        return jnp.mean(y**2)

    up = jax.ShapeDtypeStruct((16, 2**16), jnp.float32)
    down = jax.ShapeDtypeStruct((2**16, 16), jnp.float32)
    router = jax.ShapeDtypeStruct((16, n), jnp.float32)
    return trained(loss, {"router": router, "experts": [(up, down)] * n})


def nested(n: int, inside: Callable[..., Any], control: Callable[..., Any]) -> Case:
    """Control flow in control flow, `n / 4` deep."""

    def loss(w, x):
        run = functools.partial(inside, w)
        for _ in range(n // 4):
            run = functools.partial(control, run)
        return jnp.mean(run(x) ** 2)

    return trained(loss, W)


CASES: dict[str, Callable[[int], Case]] = {
    "unrolled": unrolled,
    "kept": functools.partial(unrolled, reshard_after_forward=False),
    "ahead_and_joined": functools.partial(unrolled, prefetch=2, bucket_bytes=4096),
    "rematted": rematted,
    "diamonds": diamonds,
    "averaged_sums": averaged_sums,
    "microbatches": microbatches,
    "joined": joined,
    "taken_apart": taken_apart,
    "handed_on": handed_on,
    "experts": experts,
    "branches_in_branches": functools.partial(
        nested,
        inside=lambda w, x: jnp.tanh(x @ w),
        control=lambda run, x: lax.cond(x[0, 0] > 0, run, lambda x: x * 2, x),
    ),
    "scans_in_scans": functools.partial(
        nested,
        inside=lambda w, x: jnp.tanh(x @ w),
        control=lambda run, x: lax.scan(lambda c, _: (run(c), None), x, length=2)[0],
    ),
}


def calls(case: Case, method: str = "plan") -> Counter[str]:
    """How often planning calls each function of the library, and it each other one."""
    step, state, options = case
    sharded = shardfn.fully_shard(step, cpu_mesh(8), min_size=0, **options)
    seen: Counter[str] = Counter()

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event in ("call", "c_call") and code.co_filename.startswith(ROOT):
            seen[code.co_qualname] += 1

    batch = jax.ShapeDtypeStruct((16, 16), jax.tree.leaves(state)[0].dtype)
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        getattr(sharded, method)(state, batch)
    finally:
        sys.setprofile(before)
    return seen


@pytest.mark.parametrize("name", CASES)
def test_planning_grows_as_the_program_does(name: str) -> None:
    least = {"joined": 32, "taken_apart": 32, "experts": 4}.get(name, 8)
    small, large = (calls(CASES[name](n)) for n in (least, 3 * least))
    grown = large.total() / small.total()
    worst = (large - Counter({k: 3 * v for k, v in small.items()})).most_common(3)
    assert grown < 3.4, worst


def test_no_part_of_the_search_for_dimensions_grows_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many plans it compares, which depends on how many groups there are."""
    monkeypatch.setattr("shardfn._lowering.choose_dimensions.STATIONARY_GROUPS", 1)
    monkeypatch.setattr("shardfn._lowering.choose_stationary.STATIONARY_GROUPS", 1)
    small, large = (calls(experts(n), "best_dimensions") for n in (4, 12))
    plans = large["Planner.plan"] / small["Planner.plan"]
    assert small["Planner.plan"] > 4
    grown = {k: v / small[k] for k, v in large.items() if v > large.total() / 1000}
    worst = max(grown, key=grown.__getitem__)
    assert grown[worst] < 3.4 * plans, worst
