"""In: per-device steps on several mesh axes, and wrong ones. Out: each axis name means
its own devices; a state that would differ between devices is an error with its name.
"""

import functools
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardfn
from shardfn._api.names_in_code import mentions
from shardfn.storage._stored_array import stored_array

AXES = ("replica", "data")


def integer(shape: tuple[int, ...], seed: int) -> np.ndarray:
    values = np.random.default_rng(seed).integers(-2, 3, shape)
    return values.astype(np.float32)


W, X = integer((12, 5), 0) / 4, integer((16, 12), 1)


def sharded(step, axis: Any = AXES, **options: Any) -> shardfn.ShardedStep:
    mesh = jax.make_mesh((2, 4), AXES)
    options = {"min_size": 8, "donate": False} | options
    return shardfn.fully_shard(step, mesh, axis=axis, **options)


def loss_fn(w, x):
    return jnp.mean(jnp.sum((x @ w) ** 2, -1))


def plain(w, x):
    value, grad = jax.value_and_grad(loss_fn)(w, x)
    return w - grad / 4, {"loss": value}


def averaged(w, x, over=AXES):
    value, grad = lax.pmean(jax.value_and_grad(loss_fn)(w, x), over)
    return w - grad / 4, {"loss": value}


def nested(w, x):
    """The mean over one axis of means over the other."""
    means = lax.pmean(jax.value_and_grad(loss_fn)(w, x), "data")
    value, grad = lax.pmean(means, "replica")
    return w - grad / 4, {"loss": value}


# Meshes


@pytest.mark.parametrize("step", [averaged, nested], ids=["tuple", "nested"])
def test_hybrid_axes(step) -> None:
    run = sharded(step)
    state, metrics = run(W, X)
    expected, its = jax.jit(plain)(W, X)
    np.testing.assert_array_equal(run.unshard(state), expected)
    assert metrics["loss"] == its["loss"] and metrics["loss"].is_fully_replicated
    state = stored_array(state)
    assert state.addressable_shards[0].data.size * 4 == state.size


@pytest.mark.parametrize("step", [averaged, nested], ids=["tuple", "nested"])
def test_hybrid_plan(step) -> None:
    """Scattered over `data`, and only the shards all-reduced over `replica`."""
    plan = sharded(step).plan(integer((12, 8), 0), X)
    moved = Counter((c.op, c.axis) for c in plan.collectives if c.shape)
    assert moved == {
        ("all_gather", "data"): 1,
        ("psum_scatter", "data"): 1,
        ("all_reduce", "replica"): 1,
    }
    assert not plan.fallbacks


def test_each_axis_has_its_own_index() -> None:
    def step(w, x):
        index = {name: lax.axis_index(name) for name in AXES}
        both = {"both": lax.axis_index(AXES), "swapped": lax.axis_index(AXES[::-1])}
        own = x.sum()
        sums = {name: lax.psum(own, name) for name in AXES}
        return averaged(w, x)[0], (index, both, sums, own)

    _, (index, both, sums, own) = sharded(step)(W, X)
    assert both["both"].tolist() == [*range(8)]
    assert both["swapped"].tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    table = np.asarray(own).reshape(2, 4)
    np.testing.assert_array_equal(table, X.reshape(2, 4, -1).sum(-1))
    # What differs along one axis only is joined along that axis only.
    assert index["data"].tolist() == [0, 1, 2, 3]
    assert index["replica"].tolist() == [0, 1]
    np.testing.assert_array_equal(sums["replica"], table.sum(0))
    np.testing.assert_array_equal(sums["data"], table.sum(1))


def test_an_axis_that_is_not_sharded_over() -> None:
    """`fully_shard` over `data` alone, with `replica` left to the compiler."""
    run = sharded(lambda w, x: averaged(w, x, "data"), axis="data")
    state, metrics = run(W, X)
    expected, its = jax.jit(plain)(W, X)
    np.testing.assert_array_equal(run.unshard(state), expected)
    assert metrics["loss"] == its["loss"]


# Errors


def message_of(step, *args: Any, **options: Any) -> str:
    with pytest.raises(shardfn.ShardingError) as error:
        sharded(step, **options)(*args)
    assert "test_per_device_meshes.py:" in str(error.value)
    return str(error.value)


def test_a_forgotten_mean_names_the_leaf() -> None:
    def step(state, x):
        grad = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(state["layer"]["kernel"])
        loss = lax.pmean(x.sum(), AXES)
        kernel = state["layer"]["kernel"] - grad
        return {"layer": {"kernel": kernel}, "seen": state["seen"] + loss}, {}

    text = message_of(step, {"layer": {"kernel": W}, "seen": jnp.float32(0)}, X)
    assert "state leaf 'layer/kernel' would differ between devices" in text
    assert "grads = jax.lax.pmean(grads, axis)" in text


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_rbg_keys_that_differ_between_devices(impl: str) -> None:
    def step(state, x, own=True):
        key = jax.random.key(7, impl=impl)
        key = jax.random.fold_in(key, lax.axis_index("data")) if own else key
        noise = jax.checkpoint(lambda x: x + jax.random.normal(key, x.shape))(x)
        return {"w": state["w"] + lax.pmean(noise.sum(), AXES)}, {}

    text = message_of(step, {"w": W}, X)
    assert "step is written per device and makes random numbers from several" in text
    assert "(test_rbg_keys" in text and "impl='threefry2x32'" in text
    alike = functools.partial(step, own=False)
    assert sharded(alike).plan({"w": W}, X).collectives, "one key for all is fine"


def test_a_mean_over_one_of_two_axes() -> None:
    def step(w, x):
        return averaged(w, x, "data")[0], {}

    text = message_of(step, W, X)
    assert "state leaf 'state' would differ between devices" in text


@pytest.mark.parametrize("value", ["index", "noise"])
def test_a_state_made_from_the_device_index(value: str) -> None:
    def step(state, x):
        new, metrics = averaged(state["w"], x)
        own = lax.axis_index("data")
        if value == "noise":
            key = jax.random.fold_in(jax.random.key(0), own)
            return {"w": new + jax.random.normal(key, new.shape)}, metrics
        return {"w": new + own.astype(jnp.float32)}, metrics

    assert "state leaf 'w' would differ" in message_of(step, {"w": W}, X)


def test_a_carry_that_differs() -> None:
    """A loop whose carry differs from the second round on."""

    def step(state, x):
        def body(carry, row):
            first, second = carry
            return (first + lax.pmean(row.sum(), AXES), second + first * row[0]), None

        return lax.scan(body, (state["same"], state["own"]), x)[0], {}

    def named(state, x):
        same, own = step(state, x)[0]
        return {"same": same, "own": own}, {}

    state = {"same": jnp.float32(0), "own": jnp.float32(0)}
    assert "state leaf 'own' would differ" in message_of(named, state, X)


def test_another_axis_name() -> None:
    text = message_of(lambda w, x: averaged(w, x, "batch"), W, X, axis="data")
    assert "uses mesh axis 'batch', but fully_shard shards over ('data',)" in text
    assert "Pass axis='batch' to fully_shard" in text


def test_an_axis_of_the_mesh_that_is_not_sharded_over() -> None:
    text = message_of(averaged, W, X, axis="data")
    assert "uses mesh axis 'replica'" in text


def test_a_second_axis_name_that_is_unknown() -> None:
    def step(w, x):
        new, metrics = averaged(w, x)
        return new, lax.pmean(metrics, "hosts")

    assert "uses mesh axis 'hosts'" in message_of(step, W, X)


def test_other_name_errors_are_the_users() -> None:
    def step(w, x):
        return averaged(w, x)[0] + undefined, {}  # noqa: F821

    with pytest.raises(NameError, match="name 'undefined' is not defined"):
        sharded(step)(W, X)


def test_a_step_that_tries_for_an_axis_is_plain() -> None:
    """Code that averages only where an axis is bound is the plain step here."""

    def step(w, x):
        new, metrics = plain(w, x)
        try:
            return new, lax.pmean(metrics, "data")
        except NameError:
            return new, metrics

    state, metrics = sharded(step)(W, X)
    np.testing.assert_array_equal(metrics["loss"], jax.jit(plain)(W, X)[1]["loss"])


def test_local_shapes_before_the_first_collective() -> None:
    """On the global batch the reshape fails; on a device's part it does not."""

    def step(w, x):
        return averaged(w, x.reshape(2, 12))

    expected, _ = plain(W, X)
    np.testing.assert_allclose(sharded(step)(W, X)[0], expected, rtol=1e-5)


@pytest.mark.parametrize("axis", ["data", "rows"])
def test_a_mistake_of_a_plain_step_is_the_users_own(axis) -> None:
    """Run on a device's part only if its code holds the name of an axis. That it fails
    is said by the last trace: others look for its state, and whether it is traced on an
    explicit mesh."""
    calls = []

    def step(w, x):
        calls.append(x.shape)
        try:
            return w - jnp.ones(3) @ x, {"over": axis}
        except TypeError as error:
            raise ValueError("mine") from error

    with pytest.raises(ValueError, match="^mine") as caught:
        sharded(step).plan(W, X)
    assert re.search(r"got \(3,\) and \(16,\)", str(caught.value.__cause__))
    assert not isinstance(caught.value, shardfn.ShardingError)
    assert caught.value.__context__ is caught.value.__cause__
    assert set(calls) == {(16, 12)} | ({(2, 12)} if axis == "data" else set())


def limited(w, batch):
    x = batch["data"]
    if x.shape[0] > 4:
        raise ValueError("at most 4 rows")
    return w, {"loss": x.mean(), "rows": x.shape[0] * jnp.ones(())}


def reshaped(w, batch):
    return w, batch["data"].reshape(2, 12).sum()


@pytest.mark.parametrize(
    "step, message", [(limited, "^at most 4 rows"), (reshaped, "cannot reshape")]
)
def test_a_step_that_works_on_a_part_is_not_per_device(step, message) -> None:
    """It holds the name of an axis, and would trace on local shapes."""
    with pytest.raises((ValueError, TypeError), match=message):
        sharded(step).plan(W, {"data": X})


class Model:
    def __init__(self, axis: str = "rows") -> None:
        self.axis = axis

    def step(self, w, x):
        return w, x


class Broken:
    def __getattr__(self, name):
        raise RuntimeError(name)


def named_by_default(x, axis="data"):
    return lax.pmean(x, axis)


def named_inside(x):
    return [averaged(w, x) for w in x]


@pytest.mark.parametrize(
    "function, expected",
    [
        (plain, False),
        (averaged, True),
        (jax.jit(averaged), True),
        (functools.partial(lax.pmean, axis_name="data"), True),
        (functools.partial(lax.pmean, axis_name="rows"), False),
        (named_by_default, True),
        (named_inside, True),
        (Model().step, False),
        (Model("data").step, True),
        (lambda w: Model("replica"), True),
        (lambda w: w.data, False),
        (lambda w: (Broken(), AXES), True),
        (functools.partial(plain, Broken()), False),
    ],
)
def test_code_that_names_an_axis(function, expected: bool) -> None:
    assert mentions(function, AXES) is expected


def test_a_gather_over_two_axes_at_once_is_refused() -> None:
    def step(w, x):
        return w + lax.all_gather(x, AXES, tiled=True).sum(), {}

    with pytest.raises(shardfn.ShardingError, match="name them one by one"):
        sharded(step).plan(W, X)
