"""In: leaves that are stored as they are, padded, or flattened, after they have been
wherever values go. Out: what the plain step's own arrays give there, for each next use.
"""

import copy
import io
import operator
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding

import shardfn
from shardfn.storage._stored_array import StoredArray

SHAPES = {"even": (16, 3), "padded": (199, 2), "flat": (5, 7), "one": (9,), "n": ()}
ODD = ("flat", "one", "padded")
X = np.ones((8, 2), np.float32)
MESH = jax.make_mesh((8,), ("data",))
FOUR = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])


def create() -> dict[str, jax.Array]:
    """Small negative whole numbers: sums are exact, and zeros would be the largest."""
    rng = np.random.default_rng(0)
    return {
        k: jnp.asarray(-rng.integers(1, 9, shape).astype(np.float32))
        for k, shape in SHAPES.items()
    }


WHOLE = jax.device_get(create())


def train(state, x):
    return jax.tree.map(lambda w: w + x.sum() / 16, state), {"sums": summed(state)}


def summed(state):
    leaves = jax.tree.leaves(state)
    return {
        "max": jnp.stack([w.max() for w in leaves]),
        "sum": jnp.stack([w.sum() for w in leaves]),
        "sizes": jnp.stack([jnp.int32(w.size) for w in leaves]),
    }


def evaluate(state, x):
    return state, {"x": x.sum(), "sums": summed(state)}


def distil(state, teacher):
    return state, summed(jax.tree.map(operator.sub, state, teacher))


sharded = shardfn.fully_shard(train, MESH, min_size=8)
on_four = shardfn.fully_shard(train, FOUR, min_size=8)
evaluation = shardfn.fully_shard(evaluate, MESH, min_size=8, donate=False)
distillation = shardfn.fully_shard(
    distil, MESH, min_size=8, donate=False, batch_spec=P()
)


def through_file(state: Any) -> Any:
    file = io.BytesIO()
    np.savez(file, **state)
    file.seek(0)
    return dict(np.load(file))


def there(sharding: Any) -> Callable[[Any], Any]:
    return lambda state: jax.device_put(state, sharding)


def many(state: Any) -> Any:
    """A scan over steps that keeps the values."""
    double = lambda s, x: (jax.tree.map(lambda w: w * x.mean(), s), ())  # noqa: E731
    step = shardfn.fully_shard(double, MESH, min_size=8)
    return lax.scan(step, state, np.ones((3, 8), np.float32))[0]


ROUTES: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda s: s,
    "tree.map": lambda s: jax.tree.map(lambda w: 1.0 * w, s),
    "average": lambda s: jax.tree.map(lambda a, b: (a + b) / 2, s, s),
    "device_get": jax.device_get,
    "device_put": there(NamedSharding(MESH, P())),
    "device_put to one": there(jax.devices()[5]),
    "device_put to its own": lambda s: jax.tree.map(
        lambda w: jax.device_put(w, w.sharding), s
    ),
    "jit": jax.jit(lambda s: s),
    "jit of sums": jax.jit(lambda s: jax.tree.map(lambda w: w + 0, s)),
    "jit that donates": lambda s: jax.jit(
        lambda s: jax.tree.map(lambda w: w + 0, s), donate_argnums=0
    )(jax.tree.map(jnp.copy, s)),
    "compiled": lambda s: jax.jit(lambda s: s).lower(s).compile()(s),
    "closure": lambda s: jax.jit(lambda: jax.tree.map(lambda w: w * 1, s))(),
    "scan": lambda s: lax.scan(lambda c, _: (c, ()), s, length=2)[0],
    "cond": lambda s: lax.cond(True, lambda s: s, lambda s: s, s),
    "vmap": lambda s: jax.vmap(lambda s, i: s, (None, 0), None)(s, jnp.arange(2.0)),
    "stacked": lambda s: jax.tree.map(lambda *w: jnp.stack(w)[1], s, s),
    "pickle": lambda s: pickle.loads(pickle.dumps(s)),
    "deepcopy": copy.deepcopy,
    "copy": lambda s: jax.tree.map(copy.copy, s),
    "jnp.copy": lambda s: jax.tree.map(jnp.copy, s),
    "asarray": lambda s: jax.tree.map(jnp.asarray, s),
    "file": through_file,
    "shards": lambda s: (
        jax.tree.map(lambda w: np.asarray(w.addressable_shards[0].data), s)
        | {"even": np.asarray(s["even"])}
    ),
    "another step": lambda s: evaluation(s, X)[0],
    "another mesh": on_four.shard,
    "steps in a scan": many,
    "steps in a jit": jax.jit(lambda s: evaluation(s, X)[0]),
    "shard": sharded.shard,
    "ref": lambda s: jax.tree.map(lambda w: jax.new_ref(w)[...], s),
}


STEPPED = jax.device_get(jax.jit(train)(WHOLE, X))
EVALUATED = jax.device_get(jax.jit(evaluate)(WHOLE, X))
SUMMED = jax.device_get(jax.jit(summed)(WHOLE))
TAUGHT = {k: v for k, v in WHOLE.items() if k != "n"}


def assert_equal(got: Any, expected: Any) -> None:
    assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, expected)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def stepped(state: Any) -> None:
    new, metrics = sharded(state, X)
    assert_equal((sharded.unshard(new), metrics), STEPPED)


def evaluated(state: Any) -> None:
    same, metrics = evaluation(state, X)
    assert_equal((evaluation.unshard(same), metrics), EVALUATED)


def taught(state: Any) -> None:
    arrays = {k: v for k, v in state.items() if k != "n"}
    _, sums = distillation(TAUGHT, arrays)
    assert_equal(sums, jax.jit(distil)(TAUGHT, TAUGHT)[1])


USES: dict[str, Callable[[Any], None]] = {
    "step": stepped,
    "evaluation": evaluated,
    "teacher": taught,
    "unshard": lambda s: assert_equal(sharded.unshard(s), WHOLE),
    "numpy": lambda s: assert_equal(jax.tree.map(np.asarray, s), WHOLE),
    "jax": lambda s: assert_equal(jax.jit(summed)(s), SUMMED),
}


@pytest.fixture(scope="module")
def stored() -> Any:
    """A state that a step returned."""
    state, _ = sharded(sharded.shard(jax.tree.map(lambda w: w - 1, WHOLE)), X)
    assert all(isinstance(state[k], StoredArray) for k in ODD)
    return state


@pytest.mark.parametrize("route", ROUTES)
def test_a_state_that_went(route: str, stored) -> None:
    state = ROUTES[route](stored)
    for name, use in USES.items():
        if name == "step":  # donates
            state_here = jax.tree.map(copy.copy, state)
            use(state_here)
        else:
            use(state)
    assert_equal(jax.device_get(stored), WHOLE)


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "add": lambda w: w + 1,
    "radd": lambda w: 1 + w,
    "numpy on the left": lambda w: np.float32(2) * w,
    "matmul": lambda w: jnp.ones((3, 5)) @ w,
    "itself": lambda w: w * w - w / w,
    "compare": lambda w: w == w,
    "index": lambda w: w[2],
    "mask": lambda w: w[np.arange(5) % 2 == 0],
    "at": lambda w: w.at[1].set(0),
    "rows": lambda w: jnp.stack(list(w)),
    "T": lambda w: w.T,
    "methods": lambda w: w.sum(0) + w.mean() + w.reshape(7, 5).max(1).min(),
    "astype": lambda w: w.astype(jnp.bfloat16),
    "jnp": lambda w: jnp.concatenate([w, w]).sum(0),
    "like": lambda w: jnp.zeros_like(w) + jnp.full_like(w, 2),
    "lax": lambda w: lax.add(w, w),
    "grad": jax.grad(lambda w: jnp.sum(w**2)),
    "jvp": lambda w: jax.jvp(lambda v: v * v, (w,), (w,)),
    "vmap": jax.vmap(jnp.sum),
    "scan": lambda w: lax.scan(lambda c, r: (c + r, r.max()), jnp.zeros(7), w),
    "checkpoint": jax.checkpoint(jax.nn.relu),
    "einsum": lambda w: jnp.einsum("ij,kj->ik", w, w),
    "shard_map": lambda w: jax.shard_map(
        lambda v: v * 2, mesh=AUTO, in_specs=P(), out_specs=P()
    )(w),
    "float": lambda w: float(w[0, 0]) + int(w[1, 1]),
    "len": lambda w: np.float32(len(w) + w.ndim + w.size + w.nbytes + w.itemsize),
    "bool": lambda w: bool((w < 0).all()),
    "in": lambda w: -3.0 in w[0],
    "item": lambda w: w[0, 0].item(),
    "unary": lambda w: abs(-w) + +w,
    "iteration": lambda w: sum(r.sum() for r in w),
    "disable_jit": lambda w: _without_jit(lambda: jnp.tanh(w) + w),
}
AUTO = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))


def _without_jit(run: Callable[[], Any]) -> Any:
    with jax.disable_jit():
        return run()


@pytest.mark.standard_promotion
@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations_see_the_whole_leaf(operation: str, stored) -> None:
    run = OPERATIONS[operation]
    expected = run(jnp.asarray(WHOLE["flat"]))
    assert_equal(run(stored["flat"]), expected)


def test_it_is_an_array_of_the_leafs_shape(stored) -> None:
    w = stored["padded"]
    assert isinstance(w, jax.Array) and isinstance(w, StoredArray)
    assert (w.shape, w.dtype, w.weak_type) == ((199, 2), np.float32, False)
    assert w.sharding.spec == P() and w.is_fully_replicated
    assert jax.typeof(w).shape == jax.eval_shape(lambda x: x, w).shape == (199, 2)
    assert w.devices() == set(jax.devices()) and w.committed
    assert jax.block_until_ready(w) is w and w.block_until_ready() is w
    assert w.array.shape == (200, 2) and w.array.sharding.spec == P("data")
    assert "stored as float32[200, 2] P('data',)" in repr(w)
    assert str(w) == str(jnp.asarray(WHOLE["padded"]))
    with pytest.raises(TypeError, match="unhashable"):
        hash(w)


def test_what_was_donated_says_which_leaf_it_was() -> None:
    state = sharded.shard(WHOLE)
    sharded(state, X)
    w = state["flat"]
    assert w.is_deleted() and "deleted" in repr(w)
    for use in (jnp.sum, np.asarray, lambda w: w + 1, pickle.dumps, copy.copy):
        with pytest.raises(RuntimeError, match=r"state leaf 'flat' was donated"):
            use(w)
    with pytest.raises(shardfn.ShardingError, match="state leaf '.*' was donated"):
        sharded(state, X)


def test_a_leaf_of_another_layout_keeps_its_values() -> None:
    """The same leaf stored flattened by one step and replicated by another."""
    small = shardfn.fully_shard(train, MESH, min_size=100)
    state, _ = sharded(sharded.shard(WHOLE), X)
    state, _ = small(state, X)
    assert not isinstance(state["flat"], StoredArray)
    state, _ = sharded(state, X)
    expected = jax.tree.map(lambda w: w + 3, WHOLE)
    assert_equal(sharded.unshard(state), expected)


def test_devices_of_one_are_where_it_goes() -> None:
    w = jax.device_put(sharded.shard(WHOLE), jax.devices()[3])["padded"]
    assert w.sharding == SingleDeviceSharding(jax.devices()[3])
    assert_equal(w, WHOLE["padded"])


def test_leaves_without_values_pass_through() -> None:
    """float0, as the gradient of a whole number: an array of NumPy's in JAX."""
    step = shardfn.fully_shard(
        lambda s, x: ({**s, "w": s["w"] * 2}, x.sum()), MESH, min_size=8
    )
    state = {"w": jnp.ones((16, 8)), "z": np.zeros(8, jax.dtypes.float0)}
    for _ in range(2):
        state, _ = step(state, X)
    whole = step.unshard(state)
    assert whole["z"].dtype == jax.dtypes.float0 and whole["z"].shape == (8,)
    np.testing.assert_array_equal(whole["w"], np.full((16, 8), 4))
