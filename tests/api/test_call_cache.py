"""In: calls that follow others. Out: the short way for those that run the same program,
and never for those that only look like it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from plan_helpers import cpu_mesh

import shardfn
from shardfn._api import first_run, shared_buffers
from shardfn._api.sharded_step import ShardedStep

X = np.ones((16, 4), np.float32)


def mean(state, x):
    return state, jnp.sum(state) / state.size + 0 * jnp.sum(x)


@pytest.fixture
def long_way(monkeypatch) -> list[str]:
    """Grows with every call that does not take the short way."""
    calls, prepare = [], ShardedStep._prepare

    def count(self, states, batch):
        calls.append("call")
        return prepare(self, states, batch)

    monkeypatch.setattr(ShardedStep, "_prepare", count)
    return calls


@pytest.mark.parametrize("sizes", [(1008, 1001), (1001, 1008)])
def test_states_that_are_stored_in_the_same_shape_are_told_apart(sizes) -> None:
    step = shardfn.fully_shard(mean, cpu_mesh(8), min_size=0)
    for size in (*sizes, *sizes):
        state = step.init(lambda n=size: jnp.arange(n, dtype=jnp.float32))
        for _ in range(2):
            state, got = step(state, X)
            assert got == pytest.approx((size - 1) / 2)
        assert step.unshard(state).shape == (size,)


def test_a_plan_of_another_state_changes_nothing() -> None:
    step = shardfn.fully_shard(mean, cpu_mesh(8), min_size=0)
    state, _ = step(step.init(lambda: jnp.ones(1008)), X)
    other = jax.ShapeDtypeStruct((1001,), jnp.float32)
    for query in (step.plan, step.lower):
        query(other, X)
    step.shardings(other)
    assert step.unshard(state).shape == (1008,)
    mine = jax.device_put(jnp.ones(1008), NamedSharding(step.mesh, P("data")))
    assert step.unshard(mine).shape == (1008,)


@pytest.mark.parametrize("keep", [True, False])
def test_leaves_that_are_one_array_are_not_donated_twice(keep: bool) -> None:
    """As when an average starts as the parameters; XLA would end the process."""

    def average(state, x):
        w = state["w"] + jnp.sum(x)
        return {"w": w, "ema": 0.5 * state["ema"] + 0.5 * w}, ()

    step = shardfn.fully_shard(average, cpu_mesh(8), min_size=0)
    w = step.init(lambda: {"w": jnp.ones(64), "ema": jnp.zeros(64)})["w"]
    state = {"w": w, "ema": w}
    batch = w if keep else jnp.ones(64)  # read, and donated
    for _ in range(2):
        state, _ = step(state, batch)
        batch = jnp.ones(64)
    assert step.unshard(state)["w"][0] == 129 and step.unshard(state)["ema"][0] == 81


@pytest.mark.standard_promotion
def test_other_batches_take_the_short_way_the_second_time(long_way) -> None:
    def scale(state, x, rate):
        return state * rate, jnp.sum(x)

    step = shardfn.fully_shard(scale, cpu_mesh(8), min_size=0)
    state = step.init(lambda: jnp.ones(64))
    kinds = [
        (X.astype(np.int64), 2.0),
        (X.astype(np.float64), np.float32(0.5)),
        (np.ones((8, 4), np.float32), 1),
        (jnp.asarray(X), jnp.float32(1)),  # JAX takes the second for the same
    ]
    for repeat in range(3):
        for x, rate in kinds:
            state, got = step(state, x, rate)
            assert got == x.size
        assert len(long_way) == 3, f"in round {repeat}"
    assert step.unshard(state)[0] == 1


def test_every_program_is_verified(monkeypatch) -> None:
    checks = []
    monkeypatch.setattr(first_run, "_check_compiled", lambda *_: checks.append("one"))
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def step(state, x):
        return state, jnp.sum(x @ state)

    sharded = shardfn.fully_shard(step, mesh, min_size=0, verify="error")
    weight = jnp.ones((4, 8))
    split = jax.device_put(weight, NamedSharding(mesh, P(None, "model")))
    counts = []
    for given in (weight, weight, split, split):
        sharded(sharded.shard(given), X)
        counts.append(len(checks))
    with jax.default_matmul_precision("float32"):
        sharded(sharded.shard(weight), X)
    assert [*counts, len(checks)] == [1, 1, 2, 2, 3]


SPLIT = NamedSharding(cpu_mesh(8), P("data", None))
"""The same layout as the one that steps use, written out: `device_put` to it shares."""
ALIASES = {
    "the object": lambda w: w,
    "device_put": lambda w: jax.device_put(w, SPLIT),
    "of an alias": lambda w: jax.device_put(jax.device_put(w, SPLIT), w.sharding),
    "a shard": lambda w: jax.device_put(
        w.addressable_data(0), NamedSharding(SPLIT.mesh, P())
    ),
}


@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("place", ["batch", "state"])
def test_arrays_that_share_buffers_are_kept_apart(alias: str, place: str) -> None:
    """XLA ended the process; a distillation, a target network, an old average."""

    def pull(state, x, teacher):
        rows = jnp.sum(teacher, axis=0) / teacher.shape[0]
        w, old = state["w"] + rows, state["old"] * 2
        return {"w": w, "old": old}, jnp.sum(teacher) + jnp.sum(x)

    step = shardfn.fully_shard(
        pull,
        SPLIT.mesh,
        min_size=0,
        batch_spec=(None, P("data") if alias != "a shard" else P()),
    )
    ones = jnp.ones((8, 8))
    state = step.shard({"w": ones, "old": ones})
    for times in (1, 2, 3):
        teacher = jnp.ones((8, 8))
        shared = ALIASES[alias](state["w"])
        if place == "batch":
            teacher = shared
        elif alias != "a shard":
            state = {**state, "old": shared}
        expected = jax.jit(pull)(
            *jax.tree.map(np.asarray, (state, jnp.ones((8, 1)), teacher))
        )
        state, got = step(state, jnp.ones((8, 1)), teacher)
        assert got == expected[1], times
        jax.tree.map(np.testing.assert_array_equal, step.unshard(state), expected[0])


def seen_as_numbers(state):
    """The batch through NumPy, by shard: XLA lends the buffers of the state to it."""
    shards = [
        jax.device_put(np.asarray(shard.data).view(np.int32), shard.device)
        for shard in state["w"].addressable_shards
    ]
    w = state["w"]
    return jax.make_array_from_single_device_arrays(w.shape, w.sharding, shards)


NUMBERS = {
    "of a key": lambda state: jax.random.key_data(state["key"]),
    "through NumPy": seen_as_numbers,
}


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("numbers", NUMBERS)
def test_arrays_of_other_dtypes_may_share_buffers(numbers: str, devices: int) -> None:
    def train(state, x, numbers):
        total = jnp.sum(numbers.astype(jnp.float32) / 2**20)
        new = {"key": jax.random.fold_in(state["key"], 1), "w": state["w"] + 1}
        return new, total + jnp.sum(x)

    batch_spec = P("data"), P() if numbers == "of a key" else P("data")
    step = shardfn.fully_shard(
        train, cpu_mesh(devices), min_size=0, batch_spec=batch_spec
    )
    # Aligned, as what NumPy lends to JAX must be for both to share it.
    plain = {"key": jax.random.key(0), "w": jnp.ones(2**16)}
    state = step.shard(plain)
    for _ in range(4):
        given = NUMBERS[numbers](state)
        before = np.array(given)
        expected = jax.jit(train)(plain, X, before)
        state, got = step(state, X, given)
        np.testing.assert_allclose(got, expected[1], rtol=1e-6)
        plain = expected[0]
        np.testing.assert_array_equal(given, before)  # it still is
    np.testing.assert_array_equal(step.unshard(state)["w"], 5)


def test_a_batch_that_stays_is_not_looked_at_again(monkeypatch) -> None:
    """What steps make afterwards cannot share its buffers."""
    looked = []
    find = shared_buffers._buffers
    monkeypatch.setattr(
        shared_buffers, "_buffers", lambda x: looked.append(1) or find(x)
    )
    step = shardfn.fully_shard(
        lambda s, x: ([w + x for w in s], ()), cpu_mesh(8), min_size=0
    )
    state = step.shard([jnp.ones(8)] * 5)
    x = jax.device_put(jnp.ones(8), NamedSharding(cpu_mesh(8), P("data")))
    counts = []
    for _ in range(4):
        state, _ = step(state, x)
        counts.append(len(looked))
    assert counts[1:] == [counts[1]] * 3
    step([jax.device_put(w, w.sharding) for w in state[:-1]] + [x], jnp.ones(8))
    assert len(looked) > counts[-1]


@pytest.mark.parametrize("given", ["NumPy's", "JAX's", "made by a step"])
def test_a_new_batch_is_compared_with_leaves_of_its_kind(given, monkeypatch) -> None:
    """Each leaf was looked at in each call: 3 to 6 ms where there are 600."""
    kinds, looked = [], []
    kind, find = shared_buffers.shard_kind, shared_buffers._buffers
    for name, of, seen in (("shard_kind", kind, kinds), ("_buffers", find, looked)):

        def count(x, of=of, seen=seen):
            seen.append(x)
            return of(x)

        monkeypatch.setattr(shared_buffers, name, count)
    step = shardfn.fully_shard(
        lambda s, x: ([w + jnp.sum(x) for w in s], ()), SPLIT.mesh, min_size=0
    )
    other = shardfn.fully_shard(lambda s, x: (s + x, ()), SPLIT.mesh, min_size=0)
    batch = other.shard(jnp.zeros(16))
    split = NamedSharding(SPLIT.mesh, P("data"))

    def make(batch):
        if given == "NumPy's":
            return np.ones(16, np.float32)
        if given == "JAX's":
            return jax.device_put(np.ones(16, np.float32), split)
        return other(batch, np.ones(16, np.float32))[0]

    state = step.shard([jnp.ones(8)] * 20 + [jnp.ones(16)])
    for call in range(3):
        batch = make(batch)
        kinds.clear()
        looked.clear()
        state, _ = step(state, batch)
        if call:
            assert all(x.shape == (16,) for x in kinds + looked), call
            assert len(looked) == (0 if given == "made by a step" else 2), call


def test_a_call_that_fails_decides_nothing() -> None:
    """The optimizer's state was taken for batch from then on."""

    def step(params, opt, x):
        grad = jax.grad(lambda w: jnp.sum((x @ w) ** 2))(params["w"])
        moment = 0.5 * opt["m"] + grad
        return {"w": params["w"] - moment}, {"m": moment}, jnp.sum(x)

    sharded = shardfn.fully_shard(step, cpu_mesh(8), min_size=0)
    args = {"w": jnp.ones((4, 16))}, {"m": jnp.zeros((4, 16))}
    with pytest.raises((TypeError, shardfn.ShardingError)):
        sharded(*args, np.ones((16, 5), np.float32))
    sharded(*args, X)
    assert "argument 1 ('opt')" in repr(sharded)


def test_minus_zero_is_no_zero() -> None:
    step = shardfn.fully_shard(
        lambda s, x: (s, 1 / jnp.pad(x[1:15], ((1, 1), (0, 0)), constant_values=-0.0)),
        cpu_mesh(8),
    )
    _, got = step(jnp.ones(()), X)
    assert got[0, 0] == got[15, 0] == -np.inf
