"""In: steps whose loops cast or transpose weights that are the same in every iteration.
Out: the casts are in front of the loops, and what runs is the plain step.
"""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from plan_helpers import Sharded, assert_steps_alike, cpu_mesh, shard_fn, walk

SHAPES = {"w": (16, 16), "v": (16, 16)}
SHARDS = (4, 16), (16, 4)
ROUNDS = 3


def narrow(w: jax.Array) -> jax.Array:
    return w.astype(jnp.bfloat16)


def rounded(w: jax.Array) -> jax.Array:
    """`w` as bfloat16 has it, in float32: exact if `w` is a small integer."""
    return narrow(w).astype(jnp.float32)


def updated(state: Any, x: jax.Array) -> Any:
    return {k: w + jnp.sum(x) for k, w in state.items()}, jnp.sum(x)


def scanned(state: Any, x: jax.Array) -> Any:
    def body(x: jax.Array, _: None) -> Any:
        return jnp.tanh(x @ rounded(state["w"])) + x @ rounded(state["v"]).T, None

    return updated(state, lax.scan(body, x, length=ROUNDS)[0])


def rematerialized(state: Any, x: jax.Array) -> Any:
    def loss_fn(state: Any) -> jax.Array:
        @jax.checkpoint
        def one(x: jax.Array) -> jax.Array:
            return jnp.tanh(x @ rounded(state["w"])) + x @ rounded(state["v"]).T

        return jnp.sum(lax.scan(lambda x, _: (one(x), None), x, length=ROUNDS)[0])

    loss, grads = jax.value_and_grad(loss_fn)(state)
    return jax.tree.map(lambda w, g: w - g / 64, state, grads), loss


def nested(state: Any, x: jax.Array) -> Any:
    """Both loops share the weights, and each uses one of them alone."""

    def inner(x: jax.Array, _: None) -> Any:
        return jnp.tanh(x @ rounded(state["w"])), None

    def outer(x: jax.Array, _: None) -> Any:
        x = lax.scan(inner, x, length=2)[0]
        return jnp.tanh(x @ rounded(state["w"]) @ rounded(state["v"])), None

    return updated(state, lax.scan(outer, x, length=ROUNDS)[0])


def counted(state: Any, x: jax.Array) -> Any:
    """A while loop with a constant in its test, too."""
    most = jnp.sum(state["v"]) * 0 + ROUNDS

    def body(carry: Any) -> Any:
        i, x = carry
        return i + 1, jnp.tanh(x @ rounded(state["w"]))

    return updated(state, lax.while_loop(lambda c: c[0] < most, body, (0.0, x))[1])


STEPS = [scanned, rematerialized, nested, counted]


def sharded(step: Any, **options: Any) -> Sharded:
    return shard_fn(step, cpu_mesh(4), SHAPES, (8, 16), **options)


def casts(case: Sharded) -> Counter[bool]:
    """Casts of weights' shards to bfloat16, by whether they are in a loop, per step."""
    found: Counter[bool] = Counter()
    for eqn, times, inside in walk(case.local):
        if eqn.primitive.name == "convert_element_type":
            (made,) = eqn.outvars
            if made.aval.dtype == jnp.bfloat16 and made.aval.shape in SHARDS:
                found["scan" in inside or "while" in inside] += times
    return found


@pytest.mark.parametrize("step", STEPS)
def test_casts_leave_loops(step: Any) -> None:
    case = sharded(step)
    gradients = 2 * ROUNDS if step is rematerialized else 0  # these are rounded, too
    assert casts(case)[True] == gradients
    assert casts(case)[False] <= 2, "one for each weight, in whatever loops it is"


@pytest.mark.parametrize("step", STEPS)
def test_gathers_leave_loops(step: Any) -> None:
    lines = sharded(step).plan.collectives
    gathers = [line for line in lines if line.path and line.op == "all_gather"]
    assert {line.times for line in gathers} == {1}
    count = Counter(line.path for line in gathers)
    assert max(count.values()) <= 2, "at most once in each pass"


@pytest.mark.parametrize("step", STEPS)
def test_steps_are_those_of_the_plain_step(step: Any) -> None:
    rng = np.random.default_rng(1)
    state = {
        k: jnp.asarray(rng.integers(-2, 3, shape) / 8, jnp.float32)
        for k, shape in SHAPES.items()
    }
    x = jnp.asarray(rng.normal(size=(8, 16)), jnp.float32)
    assert_steps_alike(step, sharded(step).step, state, x)


def normed(state: Any) -> jax.Array:
    """Weight normalization."""
    return state["w"] / (1 + jnp.linalg.norm(state["w"], axis=0)) + state["v"][:1]


def masked(state: Any) -> jax.Array:
    return jnp.where(state["v"] > 0, state["w"], 0)


def antisymmetric(state: Any) -> jax.Array:
    return state["w"] - state["w"].T


def assert_gathered_once(step: Any) -> None:
    """The weight of a step is, and three steps are the plain ones."""
    case = sharded(step)
    gathers = [line for line in case.plan.collectives if line.op == "all_gather"]
    assert {line.times for line in gathers if line.shape == SHAPES["w"]} == {1}
    rng = np.random.default_rng(2)
    state = {k: jnp.asarray(rng.normal(size=s) / 4) for k, s in SHAPES.items()}
    x = jnp.asarray(rng.normal(size=(8, 16)), jnp.float32)
    assert_steps_alike(step, case.step, state, x)


def test_a_norm_in_front_of_a_remat_is_a_weight_inside() -> None:
    """The remat is given a norm that the loop has made, and the weight."""

    def step(state: Any, x: jax.Array) -> Any:
        def loss_fn(w: jax.Array) -> jax.Array:
            @jax.checkpoint
            def one(x: jax.Array, size: jax.Array) -> jax.Array:
                return jnp.tanh(x @ (w / size))

            def body(x: jax.Array, _: None) -> Any:
                return one(x, 1 + jnp.linalg.norm(state["v"], axis=0)), None

            return jnp.sum(lax.scan(body, x, length=ROUNDS)[0])

        loss, grad = jax.value_and_grad(loss_fn)(state["w"])
        return {**state, "w": state["w"] - grad / 64}, loss

    assert_gathered_once(step)


@pytest.mark.covering(1)
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("make", [normed, masked, antisymmetric])
def test_what_is_made_of_weights_alone_is_gathered_once(make: Any, remat: bool) -> None:
    """It was gathered again in each iteration of a rematerialized backward pass."""

    def step(state: Any, x: jax.Array) -> Any:
        def loss_fn(w: jax.Array) -> jax.Array:
            def one(x: jax.Array) -> jax.Array:
                return jnp.tanh(x @ make({**state, "w": w}))

            body = jax.checkpoint(one) if remat else one
            return jnp.sum(lax.scan(lambda x, _: (body(x), None), x, length=ROUNDS)[0])

        loss, grad = jax.value_and_grad(loss_fn)(state["w"])
        return {**state, "w": state["w"] - grad / 64}, loss

    assert_gathered_once(step)


def test_what_changes_stays() -> None:
    """A cast of a carry. A sum of a weight that does not change leaves."""

    def step(state: Any, x: jax.Array) -> Any:
        def body(carry: Any, _: None) -> Any:
            y, w = carry
            y = y @ rounded(w) + state["v"].sum(0)
            return (jnp.tanh(y), w * 2), None

        (x, w), _ = lax.scan(body, (x, state["w"]), length=ROUNDS)
        return {"w": w, "v": state["v"]}, jnp.sum(x)

    case = sharded(step)
    assert casts(case) == {True: ROUNDS}, "of the carried weight"
    sums = [e for e, _, inside in walk(case.local) if e.primitive.name == "reduce_sum"]
    assert len(sums) == 2, "of the weight, and of the result"
    assert not any("scan" in i for e, _, i in walk(case.local) if e in sums)
    state = {k: jnp.ones(s) / 16 for k, s in SHAPES.items()}
    assert_steps_alike(step, case.step, state, jnp.ones((8, 16)))
