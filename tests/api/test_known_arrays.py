"""In: states that calls returned, as they are, changed, mixed or dropped. Out: the very
same are known again, and nothing else is.
"""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plan_helpers import cpu_mesh

import shardfn
from shardfn._api import call_cache
from shardfn._api.known_arrays import KnownArrays, last_states
from shardfn._core.limits import KNOWN_STATES
from shardfn.testing.parity import assert_same

MESH = cpu_mesh(4)


def add(state, x):
    return jax.tree.map(lambda w: w + jnp.sum(x), state), ()


ADD = shardfn.fully_shard(add, MESH, min_size=0)
READ = shardfn.fully_shard(
    lambda s, x: (s, s["a"][0] + jnp.sum(x)), MESH, min_size=1, donate=False
)


def new_state():
    return ADD.shard({"a": jnp.zeros(8), "b": jnp.zeros(8), "odd": jnp.zeros(7)})


@pytest.fixture
def looked_at(monkeypatch) -> list[str]:
    """Grows with every leaf of a state whose shape is looked at."""
    names, fits = [], call_cache.StoredKind.fits

    def count(self, x):
        names.append(self.name)
        return fits(self, x)

    monkeypatch.setattr(call_cache.StoredKind, "fits", count)
    return names


def test_what_steps_return_is_known_to_each_of_them(looked_at) -> None:
    """Two states alternate, batches of two shapes, and a second step."""
    other = shardfn.fully_shard(add, MESH, min_size=0)
    states = [new_state(), new_state()]
    for turn in range(4):
        if turn == 2:  # by then every kind of batch has been seen
            looked_at.clear()
        for i in (0, 1):
            for step, rows in ((ADD, 4), (ADD, 8), (other, 4)):
                states[i], _ = step(states[i], jnp.ones(rows))
    assert looked_at == []
    for state in states:
        whole = ADD.unshard(state)
        jax.tree.map(lambda w: np.testing.assert_array_equal(w, 64), whole)


CHANGES = {
    "another array": lambda s: {**s, "a": s["a"] + 0},
    "two swapped": lambda s: {**s, "a": s["b"], "b": s["a"]},
    "one twice": lambda s: {**s, "a": s["b"]},
    "an alias": lambda s: {**s, "a": jax.device_put(s["b"], s["b"].sharding)},
    "another layout": lambda s: {**s, "a": np.asarray(s["a"])},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_state_is_looked_at(change: str, looked_at) -> None:
    state, _ = ADD(new_state(), jnp.ones(4))
    state, _ = ADD({**state, "b": state["a"] * 2}, jnp.ones(4))
    state = CHANGES[change](state)
    expected = jax.tree.map(np.asarray, add(state, jnp.ones(4))[0])
    looked_at.clear()
    got, _ = ADD(state, jnp.ones(4))
    assert looked_at
    jax.tree.map(np.testing.assert_array_equal, ADD.unshard(got), expected)


def test_a_target_that_is_the_state_stays_usable() -> None:
    """It was donated with it, and the next call refused it."""

    def pull(online, target, x):
        def loss(w):
            return jnp.mean((x @ w["a"] - x @ target["a"]) ** 2)

        grads = jax.grad(loss)(online)
        return jax.tree.map(lambda w, g: w - g - 1, online, grads), jnp.sum(target["a"])

    step = shardfn.fully_shard(pull, MESH, min_size=0)
    online, x = {"a": jnp.ones((5, 7)), "b": jnp.ones(3)}, jnp.ones((8, 5))
    ours, _ = step(online, jax.tree.map(lambda w: w * 2, online), x)
    assert "read only: argument 1 ('target')" in repr(step)
    plain = jax.tree.map(np.asarray, ours)
    targets = ours, plain
    for _ in range(3):
        plain, expected = pull(plain, targets[1], x)
        ours, got = step(ours, targets[0], x)
        assert got == pytest.approx(expected)
        assert_same(plain, step.unshard(ours), "the state")


def test_a_deleted_state_is_refused_though_it_is_known() -> None:
    state, _ = ADD(new_state(), jnp.ones(4))
    state["b"].delete()
    with pytest.raises(shardfn.ShardingError, match="leaf 'b' was donated to"):
        ADD(state, jnp.ones(4))
    assert not state["a"].is_deleted()


@pytest.mark.parametrize("known", [True, False])
def test_a_leaf_that_another_function_was_given_is_refused(known: bool) -> None:
    """On several devices JAX 0.10 ends the process where such an array is run on."""
    state, _ = ADD(new_state(), jnp.ones(4))
    for _ in range(0 if known else KNOWN_STATES):
        ADD(new_state(), jnp.ones(4))
    jax.jit(lambda x: x * 2, donate_argnums=0)(state["b"])
    for _ in range(2):
        with pytest.raises(shardfn.ShardingError, match="leaf 'b' was donated to"):
            ADD(state, jnp.ones(4))
        assert not state["a"].is_deleted()
    state["b"] = state["a"] * 0
    state, _ = ADD(state, jnp.ones(4))
    assert np.asarray(state["b"])[0] == 4


@pytest.mark.parametrize("as_dict", [False, True])
def test_states_are_known_wherever_they_come_back(as_dict: bool, looked_at) -> None:
    def last(x, s):
        new = {k: v + jnp.sum(x) for k, v in s.items()}
        seen = jnp.sum(x)
        return {"seen": seen, "state": new} if as_dict else (seen, new)

    step, key = shardfn.fully_shard(last, MESH, min_size=0), "state" if as_dict else 1
    state = {"a": jnp.zeros(8), "b": jnp.zeros(8)}
    for turn in range(3):
        if turn == 2:
            looked_at.clear()
        state = step(jnp.ones(4), state)[key]
    assert looked_at == [] and np.asarray(state["a"])[0] == 12


def test_no_state_is_kept_alive_and_no_array_is_written_to() -> None:
    state, _ = ADD(new_state(), jnp.ones(4))
    assert not getattr(state["a"], "__dict__", {})
    dropped = weakref.ref(state["b"])
    state = {"a": state["a"]}
    gc.collect()
    assert dropped() is None


def test_an_array_of_the_place_of_a_dead_one_is_not_taken_for_it() -> None:
    class Thing:
        pass

    # The one after it keeps the memory around it, so that its place comes up again.
    thing, neighbour, kinds = Thing(), Thing(), [object()]
    known = KnownArrays.of([thing], kinds, made=1, call=1)
    assert known.are([thing])
    place = id(thing)
    del thing
    others = [neighbour]
    while id(others[-1]) != place:
        assert len(others) < 10_000_000
        others.append(Thing())
    assert not any(known.are([x]) for x in others)


def test_a_call_leaves_no_more_objects_behind_than_it_was_given() -> None:
    """References to the new arrays came before those to the old ones went: Python
    collected garbage in every call of a step with some hundred leaves."""
    x = jax.device_put(jnp.ones(4), jax.NamedSharding(MESH, jax.P("data")))
    state, collections = [jnp.zeros(8)] * 200, []
    step = shardfn.fully_shard(lambda s, x: ([w + 1 for w in s], ()), MESH)
    state, before = step.shard(state), gc.get_threshold()
    for _ in range(2):
        state, _ = step(state, x)
    gc.collect()
    gc.callbacks.append(lambda phase, info: collections.append(phase))
    gc.set_threshold(380, *before[1:])
    try:
        for _ in range(5):
            state, _ = step(state, x)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.pop()
    assert collections == []


def test_what_is_remembered_is_bounded() -> None:
    """Evaluation reads each state, whose leaves are others to it."""
    state = new_state()
    for _ in range(KNOWN_STATES):
        state, _ = ADD(state, jnp.ones(4))
        READ({"a": state["a"]}, jnp.ones(4))
    assert len(last_states.known) == KNOWN_STATES
