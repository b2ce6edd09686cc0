"""In: loops whose iterations share a weight that they squash, mask or normalize. Out:
its gradient is summed once, behind the loop, where that is the same, and what runs is
the plain step.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from plan_helpers import GATHERS, assert_steps_alike, cpu_mesh, walk

import shardfn
from shardfn._api import planner

WIDTH, ROWS, TIMES = 24, 40, 5
STATE = {"w": (WIDTH, WIDTH), "gain": (WIDTH,), "other": (WIDTH, WIDTH)}
Make = Callable[[Any, Any], jax.Array]


def masked(p: Any, x: jax.Array) -> jax.Array:
    return jnp.where(p["other"] > 0, p["w"], 0)


def normalized(p: Any, x: jax.Array) -> jax.Array:
    return p["w"] * (p["gain"] / jnp.linalg.norm(p["w"], axis=0))


def used_twice(p: Any, x: jax.Array) -> jax.Array:
    """Two terms of one sum in each iteration."""
    return jnp.sin(p["w"]) + p["w"] * p["other"]


def turned(p: Any, x: jax.Array) -> jax.Array:
    return (jnp.tanh(p["w"]) * p["other"]).T


SHARED: dict[str, Make] = {
    "squashed": lambda p, x: jnp.tanh(p["w"]),
    "masked": masked,
    "normalized": normalized,
    "used_twice": used_twice,
    "turned": turned,
    "scaled": lambda p, x: p["w"] * p["gain"] / 3,
}


def of_rows(p: Any, x: jax.Array) -> jax.Array:
    """What it is multiplied with is another in each iteration."""
    return p["w"] * jnp.cos(x[:1] * jnp.arange(1.0 * WIDTH)[:, None])


def of_two_sums(p: Any, x: jax.Array) -> jax.Array:
    """Its gradient is of two values, none of which is the sum of both."""
    return jnp.tanh(p["w"]) @ p["w"]


CHANGING: dict[str, Make] = {"of_rows": of_rows, "of_two_sums": of_two_sums}


def recurrent(make: Make, remat: bool, dtype: Any = jnp.float32) -> Any:
    """A step of a recurrent network whose cell makes its weight of the state."""

    def cell(p: Any, h: jax.Array, x: jax.Array) -> Any:
        weight = make(p, x).astype(dtype)
        return jnp.tanh(x.astype(dtype) + h @ weight), None

    def loss_fn(p: Any, x: jax.Array) -> jax.Array:
        one = jax.checkpoint(cell) if remat else cell
        start = jnp.zeros((ROWS, WIDTH), dtype)
        h, _ = lax.scan(lambda h, x: one(p, h, x), start, x.swapaxes(0, 1))
        return jnp.mean(h.astype(jnp.float32) ** 2)

    def step(p: Any, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(p, x)
        return jax.tree.map(lambda w, g: w - 0.5 * g, p, grads), loss

    return step


def arguments() -> tuple[Any, jax.Array]:
    rng = np.random.default_rng(0)
    state = {
        k: jnp.asarray(rng.normal(size=s) / np.sqrt(WIDTH), jnp.float32)
        for k, s in STATE.items()
    }
    return state, jnp.asarray(rng.normal(size=(ROWS, TIMES, WIDTH)), jnp.float32)


def sums(step: Any, devices: int = 8) -> list[tuple[str, int]]:
    sharded = shardfn.fully_shard(step, cpu_mesh(devices), min_size=0, **GATHERS)
    lines = sharded.plan(*arguments()).collectives
    return [(c.op, c.times or 0) for c in lines if "w" in c.path and c.reduces]


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("name", SHARED)
def test_its_gradient_is_summed_once(name: str, remat: bool) -> None:
    assert sums(recurrent(SHARED[name], remat)) == [("psum_scatter", 1)]


def test_without_it_is_summed_in_each_iteration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planner, "sum_before_factors", lambda program: program)
    assert sums(recurrent(masked, remat=False)) == [("psum_scatter", TIMES)]


@pytest.mark.covering(1)
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("name", [*SHARED, *CHANGING])
def test_steps_are_those_of_the_plain_step(name: str, remat: bool) -> None:
    step = recurrent((SHARED | CHANGING)[name], remat)
    sharded = shardfn.fully_shard(step, cpu_mesh(5), min_size=0, **GATHERS)
    assert_steps_alike(step, sharded, *arguments(), steps=3)


def shared_factors(p: Any, h: jax.Array, x: jax.Array) -> jax.Array:
    """Of two products: one sum is of both, the other of both with other factors."""
    made = jnp.tanh(p["w"]) * p["other"]
    return h @ made + x @ (made * p["other"])


def chained_factors(p: Any, h: jax.Array, x: jax.Array) -> jax.Array:
    """The sum of the gain needs both products and none of its own shape."""
    made = jnp.tanh(p["w"]) * p["gain"]
    return (h @ made + x @ (p["other"] * made)) * 0.5


def joint_factors(p: Any, h: jax.Array, x: jax.Array) -> jax.Array:
    """Two sums of two products each, neither of which is that of one product."""
    divided = p["w"] / (2 + p["other"] ** 2)
    return h @ divided + x @ (p["w"] * p["other"])


def more_than_sums(p: Any, h: jax.Array, x: jax.Array) -> jax.Array:
    """One sum of two products: the loop carries no other of their shape."""
    return h @ (p["w"] * 0.5) + x @ (p["w"] * jnp.tanh(p["gain"]))


SEVERAL = {
    "shared_factors": (shared_factors, 2),
    "chained_factors": (chained_factors, 2),
    "joint_factors": (joint_factors, 2),
    "more_than_sums": (more_than_sums, 2 * TIMES),
}


def of_several(product: Any, remat: bool) -> Any:
    """A step of a recurrent network whose cell has several products."""

    def loss_fn(p: Any, x: jax.Array) -> jax.Array:
        def cell(h: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(product(p, h, x)), None

        one = jax.checkpoint(cell) if remat else cell
        h, _ = lax.scan(one, jnp.zeros((ROWS, WIDTH)), x.swapaxes(0, 1))
        return jnp.mean(h**2)

    def step(p: Any, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(p, x)
        return jax.tree.map(lambda w, g: w - 0.5 * g, p, grads), loss

    return step


@pytest.mark.covering(1)
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("name", SEVERAL)
def test_sums_of_the_same_products_share_them(name: str, remat: bool) -> None:
    product, times = SEVERAL[name]
    step = of_several(product, remat)
    sharded = shardfn.fully_shard(step, cpu_mesh(8), min_size=0, **GATHERS)
    lines = sharded.plan(*arguments()).collectives
    shape = (WIDTH, WIDTH)
    assert sum(c.times or 0 for c in lines if c.reduces and c.shape == shape) == times
    assert_steps_alike(step, sharded, *arguments(), steps=3)


def test_terms_are_summed_in_the_dtype_of_their_sum() -> None:
    """Products in bfloat16 are widened before they are summed, not behind that."""
    step = recurrent(SHARED["squashed"], False, jnp.bfloat16)
    sharded = shardfn.fully_shard(step, cpu_mesh(8), min_size=0, **GATHERS)
    state, x = arguments()
    plan = sharded.plan(state, x)
    (line,) = (c for c in plan.collectives if c.path == "w" and c.reduces)
    assert (line.times, line.dtype) == (1, "float32")
    local = jax.make_jaxpr(sharded)(sharded.shard(state), x)
    carried = [
        eqn.outvars[0].aval.dtype
        for eqn, _, inside in walk(local.jaxpr)
        if eqn.primitive.name in ("add", "add_any") and "scan" in inside
        if eqn.outvars[0].aval.shape == (WIDTH, WIDTH)
    ]
    assert carried == [jnp.float32]
    assert_steps_alike(step, sharded, state, x, tol=2e-2)


def by_hand(add: Callable[[jax.Array, jax.Array, Any], jax.Array], start: float) -> Any:
    """Gradients of parts of the rows, which a loop of one's own adds up."""

    def step(p: Any, x: jax.Array) -> Any:
        def loss_fn(p: Any, x: jax.Array) -> jax.Array:
            return jnp.mean((x @ p["w"]) ** 2)

        def one(total: jax.Array, x: jax.Array) -> Any:
            loss, grads = jax.value_and_grad(loss_fn)(p, x)
            return add(total, grads["w"], p), loss

        total = jnp.full((WIDTH, WIDTH), start, jnp.float32)
        total, losses = lax.scan(one, total, x.swapaxes(0, 1))
        return {**p, "w": p["w"] - 0.1 * total}, losses

    return step


BY_HAND = {
    "multiplied": (by_hand(lambda t, g, p: t + g * p["other"], 0.0), 1),
    "from_one": (by_hand(lambda t, g, p: t + g * p["other"], 1.0), TIMES),
    "squared": (by_hand(lambda t, g, p: t + g**2 * p["other"], 0.0), TIMES),
    "decayed": (by_hand(lambda t, g, p: 0.9 * t + g * p["other"], 0.0), TIMES),
    "with_more": (by_hand(lambda t, g, p: t + (g + p["w"]) * p["other"], 0.0), TIMES),
    "divided_by": (by_hand(lambda t, g, p: t + p["other"] / (2 + g), 0.0), TIMES),
    "read": (by_hand(lambda t, g, p: t + (g + jnp.sin(t)) * p["other"], 0.0), TIMES),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_what_is_no_such_sum_stays_as_it_is(name: str) -> None:
    step, times = BY_HAND[name]
    sharded = shardfn.fully_shard(step, cpu_mesh(4), min_size=0, **GATHERS)
    lines = sharded.plan(*arguments()).collectives
    shape = (WIDTH, WIDTH)
    assert {c.times for c in lines if c.reduces and c.shape == shape} == {times}
    assert_steps_alike(step, sharded, *arguments(), steps=3)


@pytest.mark.parametrize("behind", [False, True])
def test_a_sum_that_is_returned_on_the_way_stays(behind: bool) -> None:
    """What reads it may stand in front of the addition, or behind it."""

    def step(p: Any, x: jax.Array) -> Any:
        def one(total: jax.Array, x: jax.Array) -> Any:
            grad = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(p["w"])
            before = jnp.sum(jnp.sin(total))
            new = total + grad * p["other"]
            return new, jnp.sum(jnp.sin(total)) if behind else before

        start = jnp.zeros((WIDTH, WIDTH))
        total, seen = lax.scan(one, start, x.swapaxes(0, 1))
        return {**p, "w": p["w"] - 0.1 * total}, seen

    sharded = shardfn.fully_shard(step, cpu_mesh(4), min_size=0, **GATHERS)
    assert_steps_alike(step, sharded, *arguments(), steps=3)


def test_no_iterations_are_not_multiplied() -> None:
    """With what is not a number."""
    step = recurrent(lambda p, x: p["w"] / p["gain"], remat=False)
    state, x = arguments()
    state["gain"] = jnp.zeros_like(state["gain"])
    sharded = shardfn.fully_shard(step, cpu_mesh(4), min_size=0, **GATHERS)
    new, _ = sharded(sharded.shard(state), x[:, :0])
    plain, _ = jax.jit(step)(state, x[:, :0])
    np.testing.assert_array_equal(sharded.unshard(new)["w"], plain["w"])
