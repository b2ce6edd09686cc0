"""In: states as users hold them: whole, stored, on the host, gone through a tree map.
Out: the same values, in the same shapes, and the caller's own arrays untouched.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import shardfn
from shardfn._core.sharding import local_shape
from shardfn.storage._stored_array import StoredArray, stored_array

# Stored over 8 devices: as it is, padded in one dimension, flattened, flattened layer
# by layer, replicated.
SHAPES = {
    "even": (16, 3),
    "padded": (1601, 2),
    "flat": (5, 7),
    "layers": {"kernel": (2, 41, 39), "scale": (2, 41)},
    "scalar": (),
}
STORED = {
    "even": (16, 3),
    "padded": (1608, 2),
    "flat": (40,),
    "layers": {"kernel": (2, 1600), "scale": (88,)},
    "scalar": (),
}


def is_shape(x: object) -> bool:
    return isinstance(x, tuple)


def shapes_of(state):
    return jax.tree.map(lambda x: x.shape, state)


def stored(state):
    return jax.tree.map(stored_array, state)


def make_state():
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.integers(1, 9, shape).astype(np.float32)),
        SHAPES,
        is_leaf=is_shape,
    )


def double(state, x):
    """Doubles the state; sums see no padding, and 0/0 makes NaN of it."""
    new = jax.tree.map(lambda w: w + w / w * w, state)
    total = sum(w.sum() for w in jax.tree.leaves(state))
    return new, {"total": total, "ones": x.sum()}


def evaluate(state, x):
    """Another step, in which every element counts."""
    return state, {"max": jnp.stack([-jnp.max(-w) for w in jax.tree.leaves(state)])}


X = np.ones((8, 2), np.float32)
OPTIONS = {"min_size": 8}


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((8,), ("data",))


@pytest.fixture(scope="module")
def step(mesh) -> shardfn.ShardedStep:
    return shardfn.fully_shard(double, mesh, **OPTIONS)


@pytest.fixture(scope="module")
def evaluation(mesh) -> shardfn.ShardedStep:
    return shardfn.fully_shard(evaluate, mesh, donate=False, **OPTIONS)


def assert_equal(state, expected) -> None:
    jax.tree.map(np.testing.assert_array_equal, state, expected)
    assert shapes_of(state) == shapes_of(expected)


def assert_padding_is_zero(state, whole) -> None:
    def check(x, w):
        assert np.sum(np.asarray(x) == 0) == x.size - w.size, "the values are positive"

    jax.tree.map(check, stored(state), whole)


def test_stored_shapes(step) -> None:
    state = step.shard(make_state())
    assert shapes_of(state) == shapes_of(make_state())
    assert shapes_of(stored(state)) == STORED
    for x in jax.tree.leaves(stored(state)):
        assert isinstance(x.sharding, NamedSharding)
        assert x.sharding.is_fully_replicated == (x.shape == ())
    assert_padding_is_zero(state, make_state())


def test_unshard_undoes_shard(step) -> None:
    whole = make_state()
    back = step.unshard(step.shard(whole))
    assert_equal(back, whole)
    assert all(len(x.devices()) == 1 for x in jax.tree.leaves(back))


def test_an_unsharded_state_outlives_the_next_step(step) -> None:
    state = step.shard(make_state())
    back = step.unshard(state)
    step(state, X)
    assert_equal(back, make_state())


def test_init_gives_what_the_plain_function_gives(step) -> None:
    state = step.init(make_state)
    assert shapes_of(stored(state)) == STORED
    assert_equal(step.unshard(state), make_state())
    assert_padding_is_zero(state, make_state())


def test_logical_shapes_and_zero_padding_through_steps(step) -> None:
    state, whole = step.shard(make_state()), make_state()
    for _ in range(3):
        total = sum(w.sum() for w in jax.tree.leaves(whole))
        state, metrics = step(state, X)
        assert metrics["total"] == total and metrics["ones"] == X.sum()
        whole = jax.tree.map(lambda w: 2 * w, whole)
        assert shapes_of(stored(state)) == STORED
        assert shapes_of(state) == shapes_of(whole)
        assert_padding_is_zero(state, whole)
    assert_equal(step.unshard(state), whole)


def test_a_stored_state_that_went_through_a_tree_map(step) -> None:
    """Its leaves are whole then, and placed again."""
    state = jax.tree.map(lambda x: x * 1.0, step.shard(make_state()))
    assert not isinstance(state["flat"], StoredArray)
    assert_equal(step.unshard(state), make_state())
    new, metrics = step(state, X)
    assert metrics["total"] == sum(w.sum() for w in jax.tree.leaves(make_state()))
    assert_equal(step.unshard(new), jax.tree.map(lambda w: 2 * w, make_state()))


def test_another_step_on_the_same_stored_arrays(step, evaluation) -> None:
    state, _ = step(step.shard(make_state()), X)
    fresh = shardfn.fully_shard(evaluate, step.mesh, donate=False, **OPTIONS)
    for other in (evaluation, fresh):
        same, metrics = other(state, X)
        expected = [2 * w.min() for w in jax.tree.leaves(make_state())]
        np.testing.assert_array_equal(metrics["max"], expected)
        assert_equal(other.unshard(same), step.unshard(state))
    state, _ = step(state, X)
    assert_equal(step.unshard(state), jax.tree.map(lambda w: 4 * w, make_state()))


def test_the_callers_whole_arrays_survive(step) -> None:
    whole = make_state()
    state = step.shard(whole)
    step(state, X)
    step(whole, X)
    assert all(x.is_deleted() for x in jax.tree.leaves(state)), "it was donated"
    assert not any(x.is_deleted() for x in jax.tree.leaves(whole))
    assert_equal(whole, make_state())


def test_arrays_replicated_on_the_mesh_survive(step) -> None:
    """`jax.device_put` to the stored sharding may reuse their buffers; donation took
    them then."""
    whole = make_state() | {"scalar": np.float32(3)}
    whole = jax.device_put(whole, NamedSharding(step.mesh, P()))
    step(step.shard({k: v for k, v in whole.items() if k != "scalar"}), X)
    for name in ("even", "flat", "padded"):
        np.testing.assert_array_equal(whole[name], make_state()[name])


def test_host_states(step) -> None:
    host = jax.tree.map(np.asarray, make_state())
    host["scalar"] = float(host["scalar"])
    assert shapes_of(stored(step.shard(host))) == STORED
    new, _ = step(host, X)
    doubled = jax.tree.map(lambda w: 2 * w, make_state())
    assert_equal(step.unshard(new), doubled)
    assert host["flat"].shape == (5, 7)


def test_shardings_place_what_needs_no_padding(step) -> None:
    whole = {"even": jnp.ones((16, 3)), "scalar": jnp.float32(1)}
    placed = jax.device_put(whole, step.shardings(whole))
    state = step.shard(whole)
    assert jax.tree.map(lambda x: x.sharding, placed) == step.shardings(whole)
    assert jax.tree.map(lambda x: x.sharding, state) == step.shardings(whole)
    step(step.shard(placed), X)
    assert not placed["even"].is_deleted(), "shard leaves the caller's arrays alone"


def test_shardings_of_abstract_whole_and_stored_states_agree(step) -> None:
    whole = make_state()
    state = step.shard(whole)
    abstract = jax.eval_shape(lambda: whole)
    assert step.shardings(whole) == step.shardings(state) == step.shardings(abstract)
    assert step.shardings(whole) == jax.tree.map(lambda x: x.sharding, state)
    placed = jax.device_put(whole, step.shardings(whole))
    assert shapes_of(placed) == shapes_of(whole)


def test_without_donation_the_old_state_stays_usable(mesh) -> None:
    step = shardfn.fully_shard(double, mesh, donate=False, **OPTIONS)
    state = step.shard(make_state())
    first, _ = step(state, X)
    second, _ = step(state, X)
    assert_equal(step.unshard(first), step.unshard(second))
    assert_equal(step.unshard(state), make_state())


def test_each_device_holds_its_share(step) -> None:
    state = step.shard(make_state())
    leaves, _ = step.storage.leaves((state,))
    for (leaf, sharding), x in zip(
        step.storage.each(leaves), jax.tree.leaves(stored(state)), strict=True
    ):
        blocks = [s.data.shape for s in x.addressable_shards]
        assert len(blocks) == 8
        assert set(blocks) == {
            local_shape(leaf.aval.shape, sharding, step.storage.axes)
        }


@pytest.mark.parametrize("count", [4, 8])
def test_scalars_and_keys_of_the_batch_come_from_any_devices(count) -> None:
    """Committed to one device, as a restored key is, or to those of another mesh; also
    on a call that goes the short way."""

    def step(w, x, key, lr):
        return w - lr * jax.random.normal(key, w.shape), x.sum() * lr

    mesh = jax.make_mesh((8,), ("data",))
    there = jax.make_mesh((count,), ("data",), devices=jax.devices()[:count])
    sharded = shardfn.fully_shard(step, mesh, min_size=0, donate=False)
    w, x = jnp.ones((16, 8)), jnp.ones((8, 4))
    key, lr = jax.random.key(0), jnp.float32(0.5)
    plain = jax.jit(step)(w, x, key, lr)
    one, all_ = jax.devices()[3], NamedSharding(there, P())
    for place in (None, one, all_, one):
        given = (key, lr) if place is None else jax.device_put((key, lr), place)
        found = jax.device_get(sharded(w, x, *given))
        jax.tree.map(np.testing.assert_allclose, found, jax.device_get(plain))


def test_results_on_readmes_mesh_are_like_other_arrays() -> None:
    """That mesh has explicit axes; results lie on the state's, so that JAX does not ask
    for an `out_sharding` where they are indexed, sorted or contracted."""
    mesh = jax.make_mesh((8,), ("data",))

    def train_step(w, x):
        return w * 0.5, x @ w

    step = shardfn.fully_shard(train_step, mesh, min_size=0, donate=False)
    w, x = jnp.arange(24.0).reshape(6, 4), jnp.arange(96.0).reshape(16, 6) % 7
    state, preds = step(w, x)
    new, expected = train_step(w, x)
    assert preds.sharding.mesh == jax.tree.leaves(state)[0].sharding.mesh
    uses = {
        "a row": lambda y: y[3],
        "sorted": lambda y: jnp.sort(y.ravel()),
        "matmul": lambda y: y @ w.T,
        "stacked": lambda y: jnp.concatenate([y, y[:3]]),
    }
    for name, use in uses.items():
        np.testing.assert_array_equal(use(preds), use(expected), err_msg=name)
    np.testing.assert_array_equal(step.unshard(state), new)
