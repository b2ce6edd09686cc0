"""In: the ways to call a sharded step. Out: each gives the plain step's results; with
one device the compiled program holds no collective.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from sharded_and_plain import make_mesh, shard_program

import shardfn
from shardfn.storage._stored_array import stored_array
from shardfn.testing import assert_same
from shardfn.testing._compare import snapshot

pytestmark = pytest.mark.standard_promotion

COLLECTIVE = re.compile(
    r"all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
)


def init(key):
    return {"w": jax.random.normal(key, (7, 36)), "step": jnp.int32(0)}


def arguments(rows: int = 16):
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, 7), dtype=np.float32)
    return x, {"target": rng.standard_normal((rows, 36), dtype=np.float32)}


def three_arguments(state, x, y, key):
    """Not `(state, batch)`: two batch arguments and a key."""
    noise = jax.random.normal(key, y["target"].shape)

    def loss_fn(w):
        return ((x @ w - y["target"] - 0.1 * noise) ** 2).mean()

    loss, grad = jax.value_and_grad(loss_fn)(state["w"])
    state = {"w": state["w"] - 0.1 * grad, "step": state["step"] + 1}
    return state, loss, {"first": x[:, 0]}


def assert_same_call(step, state, *args):
    """Asserts that one call gives what the plain step gives; returns the new state."""
    expected = jax.jit(three_arguments)(init(jax.random.key(0)), *args)
    result = step(state, *args)
    whole = (step.unshard(result[0]), *result[1:])
    assert_same(expected, whole, "one call", weak_types=False)
    return result[0]


@pytest.mark.parametrize("mesh", ["8", "8-auto", "2x4"])
def test_more_arguments_and_results(mesh: str) -> None:
    mesh = make_mesh(mesh)
    axis = mesh.axis_names if len(mesh.axis_names) > 1 else "data"
    step = shardfn.fully_shard(three_arguments, mesh, axis=axis, min_size=8)
    state = step.init(init, jax.random.key(0))
    assert_same_call(step, state, *arguments(), jax.random.key(7))


def test_as_a_decorator() -> None:
    @shardfn.fully_shard(mesh=make_mesh("4"), min_size=8)
    def train_step(state, x, y, key):
        return three_arguments(state, x, y, key)

    state = train_step.init(init, jax.random.key(0))
    assert_same_call(train_step, state, *arguments(), jax.random.key(7))


@pytest.mark.parametrize("place", [jax.device_get, lambda x: x, None])
def test_states_from_anywhere(place) -> None:
    """Host arrays, a state on one device, and one given to `.shard`."""
    step = shardfn.fully_shard(three_arguments, make_mesh("8"), min_size=8)
    state = init(jax.random.key(0))
    state = step.shard(state) if place is None else place(state)
    state = assert_same_call(step, state, *arguments(), jax.random.key(7))
    assert not stored_array(state["w"]).sharding.is_fully_replicated


def test_without_donation_the_old_state_stays() -> None:
    step = shardfn.fully_shard(
        three_arguments, make_mesh("8"), min_size=8, donate=False
    )
    state = step.init(init, jax.random.key(0))
    for _ in range(2):
        assert_same_call(step, state, *arguments(), jax.random.key(7))


def test_another_batch_size_and_back() -> None:
    step = shardfn.fully_shard(
        three_arguments, make_mesh("8"), min_size=8, donate=False
    )
    state = step.init(init, jax.random.key(0))
    for rows in (16, 40, 16):
        assert_same_call(step, state, *arguments(rows), jax.random.key(7))


def test_the_state_may_be_another_argument() -> None:
    def train_step(x, state):
        return state | {"w": state["w"] * 0.5}, (x @ state["w"]).sum(-1)

    step = shardfn.fully_shard(train_step, make_mesh("8"), state_argnums=1, min_size=8)
    x, start = arguments()[0], init(jax.random.key(0))
    expected = jax.jit(train_step)(x, start)
    state, rows = step(x, step.shard(start))
    assert_same(expected, (step.unshard(state), rows), "argument 1")


def test_states_of_other_sizes_are_told_apart() -> None:
    """A padded state, then whole ones that have the shapes the padded one is stored in,
    through one transform: none is taken for another."""

    def train_step(state, x):
        return {"w": state["w"] * 2}, {"mean": state["w"].mean(), "sum": x.sum()}

    step = shardfn.fully_shard(train_step, make_mesh("8"), min_size=8, donate=False)
    padded = {"w": jnp.arange(17.0 * 9).reshape(17, 9)}
    stored = step.shard(padded)
    x = arguments()[0]
    for whole in (padded, {"w": jnp.ones(stored["w"].shape)}, padded):
        new, metrics = step(whole, x)
        new = step.unshard(new)
        assert new["w"].shape == whole["w"].shape
        np.testing.assert_array_equal(new["w"], 2 * whole["w"])
        np.testing.assert_allclose(metrics["mean"], whole["w"].mean(), rtol=1e-6)


def test_unshard_undoes_shard_exactly() -> None:
    program = programs.get("state_of_everything")
    step = shard_program(program, make_mesh("8"))
    whole = jax.jit(program.init)(jax.random.key(0))
    before = snapshot(whole)
    after = snapshot(step.unshard(step.shard(whole)))
    assert_same(before, after, "unshard(shard(state))", tol=0.0)


@pytest.mark.parametrize("name", ["gpt_scan_remat", "masked_mean", "opt_adafactor"])
def test_one_device_emits_no_collective(name: str) -> None:
    program = programs.get(name)
    step = shard_program(program, make_mesh("1"))
    state = jax.eval_shape(program.init, jax.random.key(0))
    compiled = step.lower(state, program.batch(0)).compile()
    assert COLLECTIVE.findall(compiled.as_text()) == []
