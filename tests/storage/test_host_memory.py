"""In: states of which some leaves live in the host's memory. Out: they are there after
everything that may be done with a state, with the values that they had.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plan_helpers import cpu_mesh

import shardfn
from shardfn._core.memories import memory_of
from shardfn.storage._stored_array import StoredArray
from shardfn.storage.checkpoint import Checkpoints
from shardfn.storage.safetensors import load_safetensors, write_safetensors

SHAPES = {"even": (16, 6), "padded": (1003, 2), "flat": (5, 7), "n": ()}
HOST = {"m": {"even": True, "padded": True, "flat": True, "n": False}}


def create() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    leaves = {k: rng.integers(-9, 9, s).astype(np.float32) for k, s in SHAPES.items()}
    return {part: jax.tree.map(jnp.asarray, leaves) for part in ("w", "m")}


def train(state: Any, x: jax.Array) -> Any:
    grads = jax.tree.map(lambda w: jnp.mean(x) * w, state["w"])
    m = jax.tree.map(lambda m, g: 0.5 * m + g, state["m"], grads)
    w = jax.tree.map(lambda w, m: w - m, state["w"], m)
    return {"w": w, "m": m}, sum(leaf.sum() for leaf in jax.tree.leaves(m))


def evaluate(state: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(x) * sum(leaf.sum() for leaf in jax.tree.leaves(state))


MESH = cpu_mesh(8)
OPTIONS: dict[str, Any] = {"min_size": 8, "offload": {"m/*": "host"}}
step = shardfn.fully_shard(train, MESH, **OPTIONS)
plain = shardfn.fully_shard(train, MESH, min_size=8)
X = jnp.ones((8, 2))


def check(state: Any, expected: Any = None) -> None:
    """The moments are on the host, all else is not, and all have these values."""
    expected = create() if expected is None else expected
    found = {k: memory_of(x.sharding) == "host" for k, x in state["m"].items()}
    assert found == HOST["m"]
    assert not any(memory_of(x.sharding) == "host" for x in state["w"].values())
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), expected)


def test_states_are_made_there() -> None:
    check(step.init(create))
    check(step.shard(create()))
    named = step.shardings(create())
    assert {k: memory_of(s) == "host" for k, s in named["m"].items()} == HOST["m"]


def test_steps_leave_them_there() -> None:
    state, expected = step.init(create), create()
    for _ in range(3):
        state, total = step(state, X)
        expected, found = jax.jit(train)(expected, X)
        np.testing.assert_array_equal(total, found)
    check(state, expected)
    jax.tree.map(np.testing.assert_array_equal, step.unshard(state), expected)


def test_old_states_are_given_to_new_ones() -> None:
    state = step.init(create)
    lowered = step.lower(state, X)
    text = lowered.compile().as_text()
    assert text is not None
    aliases = text.splitlines()[0].count("may-alias")
    assert aliases == len(jax.tree.leaves(state))
    step(state, X)
    assert all(x.is_deleted() for x in jax.tree.leaves(state))


def test_steps_are_traced_with_them() -> None:
    xs = jnp.stack([X, 2 * X])
    many = jax.jit(lambda state, xs: jax.lax.scan(step, state, xs))
    state, _ = many(step.init(create), xs)
    expected, _ = jax.lax.scan(train, create(), xs)
    check(state, expected)


def test_one_leaf_twice_is_donated_once() -> None:
    state = step.init(create)
    twice = {"w": state["w"], "m": {**state["m"], "n": state["w"]["n"]}}
    made, _ = step(twice, X)
    check(made, jax.jit(train)(create(), X)[0])


def test_whole_leaves_are_computed_on_the_device() -> None:
    state = step.init(create)
    doubled = jax.tree.map(lambda x: 2 * x, state)
    expected = jax.tree.map(lambda x: 2 * x, create())
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(doubled), expected)


@pytest.mark.parametrize("devices, given", [(8, OPTIONS), (4, OPTIONS), (8, None)])
def test_checkpoints_go_to_meshes_with_and_without(tmp_path, devices, given) -> None:
    with Checkpoints(tmp_path, step) as checkpoints:
        checkpoints.save(1, step.init(create))
    options: dict[str, Any] = given or {"min_size": 8}
    there = shardfn.fully_shard(train, cpu_mesh(devices), **options)
    with Checkpoints(tmp_path, there) as checkpoints:
        restored = checkpoints.restore(jax.eval_shape(create))
    if given:
        check(restored)
    else:
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored), create())
        kinds = {memory_of(x.sharding) for x in jax.tree.leaves(restored)}
        assert kinds == {"device"}


def test_whole_leaves_come_back_from_there(tmp_path) -> None:
    """Each device has all of them; scalars are never there, whatever `min_size`."""
    whole = shardfn.fully_shard(
        train, MESH, min_size=0, shard={"m/even": False}, offload={"m/*": "host"}
    )
    state = whole.init(create)
    assert state["m"]["even"].is_fully_replicated
    check(state)
    plain_state = create()
    for _ in range(2):
        state, total = whole(state, X)
        plain_state, expected = jax.jit(train)(plain_state, X)
        np.testing.assert_allclose(total, expected, rtol=1e-6)
    check(state, plain_state)
    jax.tree.map(np.testing.assert_array_equal, whole.unshard(state), plain_state)
    with Checkpoints(tmp_path, whole) as checkpoints:
        checkpoints.save(1, state)
        check(checkpoints.restore(jax.eval_shape(create)), plain_state)


def test_tensors_are_written_and_read(tmp_path) -> None:
    write_safetensors(tmp_path / "state.safetensors", step.init(create), step)
    made = load_safetensors(
        tmp_path / "state.safetensors", jax.eval_shape(create), step
    )
    check(made)


def test_evaluation_reads_them_there() -> None:
    state = step.init(create)
    evaluation = shardfn.fully_shard(evaluate, MESH, **OPTIONS)
    np.testing.assert_array_equal(evaluation(state, X), evaluate(create(), X))
    check(state)


def test_a_step_that_does_not_know_of_it_says_so() -> None:
    state = step.init(create)
    with pytest.raises(shardfn.ShardingError) as caught:
        plain(state, X)
    message = str(caught.value)
    assert "state leaf 'm/even' is in the host's memory" in message
    assert "train stores it on the devices" in message
    assert (
        "the step that stored it, such as {'m/even': 'host'}" in message
        and "step.shard(state)" in message
    )
    assert "state leaf 'm/even' and 2 more: in the host's memory" in str(
        plain.plan(state, X)
    )
    assert not step.plan(state, X).notes
    check(state)  # nothing was moved, nothing donated
    moved = plain.shard(state)
    assert {memory_of(x.sharding) for x in jax.tree.leaves(moved)} == {"device"}


@pytest.mark.parametrize(
    "offload, why, advice",
    [
        ({"m/*": "host"}, "of shape (2, 2), it has fewer elements than", "shape that"),
        ("1GiB", "offload='1GiB' has chosen others", "Give it offload='host'"),
    ],
)
def test_a_leaf_that_offload_leaves_there_says_why(offload, why, advice) -> None:
    other = shardfn.fully_shard(train, MESH, min_size=8, offload=offload)
    state = step.init(create)
    if offload == OPTIONS["offload"]:
        on_host = jax.NamedSharding(MESH, jax.P(), memory_kind="pinned_host")
        state["m"]["even"] = jax.device_put(jnp.ones((2, 2)), on_host)
    with pytest.raises(shardfn.ShardingError) as caught:
        other(state, X)
    message = str(caught.value)
    assert why in message and advice in message and "Pass offload" not in message
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


def test_a_misspelt_pattern_is_asked_about() -> None:
    misspelt = shardfn.fully_shard(train, MESH, min_size=8, offload={"m/evn": "host"})
    state = step.init(create)
    with pytest.raises(shardfn.ShardingError, match="Did you mean 'm/even'"):
        misspelt(state, X)
    check(step(state, X)[0], jax.jit(train)(create(), X)[0])


def test_without_a_mesh_there_is_no_memory_to_name() -> None:
    for memory in ("host", "auto", "70GiB"):
        with pytest.raises(shardfn.ShardingError, match="offload=.* needs a mesh"):
            shardfn.fully_shard(train, axis="data", offload={"m/*": memory})


@pytest.mark.parametrize("value", ["disk", True, "device"])
def test_other_memories_are_refused(value) -> None:
    with pytest.raises(ValueError, match="None, 'host', 'auto' or the bytes"):
        shardfn.fully_shard(train, MESH, offload={"m/*": value})


def test_padding_stays_zero_there() -> None:
    adds = shardfn.fully_shard(
        lambda state, x: jax.tree.map(lambda w: w + x.sum(), state), MESH, **OPTIONS
    )
    stored = adds(adds.init(create), X)["m"]["padded"]
    assert isinstance(stored, StoredArray)
    rows = np.asarray(stored.array)
    np.testing.assert_array_equal(rows[:1003], create()["m"]["padded"] + X.sum())
    assert len(rows) == 1008 and not rows[1003:].any()
