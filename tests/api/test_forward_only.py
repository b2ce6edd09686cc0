"""In: functions that return no state: losses, evaluations, predictions. Out: what the
plain function returns, from the state as it is stored, for any number of rows.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plan_helpers import cpu_mesh

import shardfn
from shardfn.testing import assert_same

D, F, OUT = 24, 40, 5


def predict(params: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["up"] + params["bias"]) @ params["down"]


def loss(params: Any, batch: Any) -> dict[str, jax.Array]:
    error = predict(params, batch["x"]) - batch["y"]
    return {"loss": (error**2).mean(), "worst": abs(error).max(-1)}


def swapped(x: jax.Array, params: Any) -> jax.Array:
    return predict(params, x)


def grads(params: Any, batch: Any) -> Any:
    made = jax.grad(lambda p: loss(p, batch)["loss"])(params)
    return {"of up": made["up"]}


def make_params() -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    shapes = {"up": (D, F), "bias": (F,), "down": (F, OUT)}
    return {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in shapes.items()}


def make_batch(rows: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(rows)
    sides = {"x": (rows, D), "y": (rows, OUT)}
    return {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in sides.items()}


@pytest.fixture(scope="module")
def state() -> Any:
    """Parameters, 13 of whose columns are padded, stored by a training step."""

    def train_step(state: Any, batch: Any) -> Any:
        return jax.tree.map(lambda p: 0.5 * p, state), loss(state, batch)

    step = shardfn.fully_shard(train_step, cpu_mesh(8), min_size=8)
    return step(step.shard(make_params()), make_batch(16))[0]


@pytest.mark.covering(1)
@pytest.mark.parametrize("fn", [loss, grads])
@pytest.mark.parametrize("rows", [16, 13, 3, 1])
def test_any_number_of_rows(state: Any, fn: Any, rows: int) -> None:
    evaluate = shardfn.fully_shard(fn, cpu_mesh(8), min_size=8)
    plain = jax.tree.map(lambda p: 0.5 * p, make_params())
    for seed in range(2):
        batch = jax.tree.map(lambda x, s=seed: x + s, make_batch(rows))
        assert_same(fn(plain, batch), evaluate(state, batch), "result", tol=1e-4)
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


@pytest.mark.parametrize("options", [{}, {"state_argnums": 0}], ids=str)
def test_the_state_is_read_as_it_is_stored(state: Any, options: Any) -> None:
    evaluate = shardfn.fully_shard(loss, cpu_mesh(8), min_size=8, **options)
    plan = evaluate.plan(state, make_batch(16))
    assert "state: none comes back; read only: argument 0 ('params')" in plan.notes
    gathered = {c.path for c in plan.collectives if c.op == "all_gather"}
    assert gathered == {"up", "bias", "down"}


def test_what_arrives_stored_is_the_state(state: Any) -> None:
    x = make_batch(16)["x"]
    plain = jax.tree.map(lambda p: 0.5 * p, make_params())
    evaluate = shardfn.fully_shard(swapped, cpu_mesh(8), min_size=8)
    assert_same(predict(plain, x), evaluate(x, state), "result", tol=1e-4)
    plan = evaluate.plan(x, state)
    assert {c.path for c in plan.collectives if c.op == "all_gather"} >= {"up", "down"}


def test_rows_that_are_asked_to_be_split_have_to_be_even(state: Any) -> None:
    evaluate = shardfn.fully_shard(
        loss, cpu_mesh(8), min_size=8, batch_spec=jax.sharding.PartitionSpec("data")
    )
    with pytest.raises(shardfn.ShardingError, match="has 3 rows, which 8 devices"):
        evaluate(state, make_batch(3))


def test_generation_is_one_function(state: Any) -> None:
    """A loop around a forward pass, with its carry inside."""

    def generate(params: Any, x: jax.Array) -> jax.Array:
        def again(carry: Any) -> Any:
            i, x = carry
            made = predict(params, x)
            return i + 1, x + jnp.tile(made, (1, 5))[:, :D]

        return jax.lax.while_loop(lambda c: c[0] < 4, again, (0, x))[1]

    plain = jax.tree.map(lambda p: 0.5 * p, make_params())
    run = shardfn.fully_shard(generate, cpu_mesh(8), min_size=8, state_argnums=0)
    for rows in (16, 1):
        x = make_batch(rows)["x"]
        assert_same(generate(plain, x), run(state, x), "result", tol=1e-4)


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_a_cache_beside_stored_parameters_is_none_of_the_state(
    state: Any, rows: int
) -> None:
    """Of one row nobody can tell by its shape: it comes back, and they do not."""

    def decode(params: Any, cache: jax.Array, x: jax.Array, i: Any) -> Any:
        made = predict(params, x)
        where = (0, i, 0)
        return jax.lax.dynamic_update_slice(cache, made[None, None, 0], where), made

    step = shardfn.fully_shard(decode, cpu_mesh(8), min_size=8)
    plain = jax.tree.map(lambda p: 0.5 * p, make_params())
    x = make_batch(rows)["x"]
    shape = jax.eval_shape(predict, plain, x).shape
    mine = expected = jnp.zeros((2, 4, *shape[1:]))
    for i in range(3):
        given, (mine, got) = mine, step(state, mine, x, i)
        expected, made = decode(plain, expected, x, i)
        assert_same((expected, made), (mine, got), "result", tol=1e-4)
        assert i == 0 or given.is_deleted()
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))
    found = "state: none comes back; read only: argument 0 ('params')"
    assert found in step.plan(state, mine, x, 0).notes


def one_row(cache: Any, params: Any, x: jax.Array, i: Any) -> Any:
    """A sequence by itself: the cache has no dimension of rows."""
    made = predict(params, x)
    cache = {"made": jax.lax.dynamic_update_slice(cache["made"], made[None], (i, 0))}
    return cache, cache["made"].sum(0)


def one_token(cache: Any, params: Any, token: Any, i: Any) -> Any:
    return one_row(cache, params, params["up"].T[token, :D], i)


def in_order(fn: Any, first: str) -> Any:
    if first == "cache":
        return fn
    return lambda params, cache, x, i: fn(cache, params, x, i)


@pytest.mark.parametrize("first", ["params", "cache"])
def test_a_cache_without_rows_is_none_of_the_state(first: str) -> None:
    """Of parameters that nobody has stored yet: a tree that no batch is, next to x."""
    plain, x = make_params(), make_batch(1)["x"][0]
    step = shardfn.fully_shard(in_order(one_row, first), cpu_mesh(8), min_size=8)
    mine = expected = {"made": jnp.zeros((4, OUT))}
    for i in range(3):
        both = (mine, plain) if first == "cache" else (plain, mine)
        given, (mine, got) = mine, step(*both, x, i)
        expected, made = one_row(expected, plain, x, i)
        assert_same((expected, made), (mine, got), "result", tol=1e-4)
        assert i == 0 or given["made"].is_deleted()
    assert not any(x.is_deleted() for x in jax.tree.leaves(plain))
    position = {"cache": 1, "params": 0}[first]
    (found, *_) = step.plan(*both, x, 0).notes
    assert found == f"state: none comes back; read only: argument {position} ('params')"


@pytest.mark.parametrize("first", ["params", "cache"])
def test_a_cache_next_to_scalars_alone_is_asked_about(state: Any, first: str) -> None:
    """A token may be a place in a buffer, and the parameters a batch for it, unless
    they are stored."""
    fn, cache = in_order(one_token, first), {"made": jnp.zeros((4, OUT))}
    step = shardfn.fully_shard(fn, cpu_mesh(8), min_size=8)
    params, position = make_params(), {"cache": 1, "params": 0}[first]

    def args(params: Any) -> Any:
        return ((cache, params) if first == "cache" else (params, cache)) + (3, 0)

    with pytest.raises(shardfn.ShardingError) as caught:
        step(*args(params))
    for part in (
        f"argument {1 - position} ('cache'), which comes back as result 0, may be the",
        f"Pass state_argnums={1 - position} to fully_shard if that is the state",
        "If it is a cache of the batch, return the parameters too",
    ):
        assert part in str(caught.value)
    told = shardfn.fully_shard(
        fn, cpu_mesh(8), min_size=8, state_argnums=position, donate=False
    )
    assert_same(fn(*args(params)), told(*args(params)), "result", tol=1e-4)
    halves = jax.tree.map(lambda p: 0.5 * p, params)
    assert_same(fn(*args(halves)), step(*args(state)), "result", tol=1e-4)
