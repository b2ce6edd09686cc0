"""In: a plain step without a mesh, in the caller's `shard_map` or `pmap`. Out: on local
shards it does what the plain step does on whole arrays.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import shardfn

pytestmark = pytest.mark.standard_promotion

TX = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(1e-1, momentum=0.9))
METRICS = {"loss": P(), "rows": P("data")}
KEY = jax.random.key(0)
BATCH = {
    "x": np.random.default_rng(0).normal(size=(16, 12)).astype(np.float32),
    "y": np.random.default_rng(1).normal(size=(16, 4)).astype(np.float32),
}


@jax.jit
def create(key: jax.Array) -> Any:
    """Leaves that 4 and 8 devices divide, and two that are stored padded."""
    one, two = jax.random.split(key)
    params = {
        "even": jax.random.normal(one, (12, 16)),
        "odd": jax.random.normal(two, (33,)),
        "out": jax.random.normal(one, (49, 4)),
    }
    return params, TX.init(params)


def step(state, batch):
    params, opt = state

    def loss_fn(params):
        wide = jnp.tile(params["odd"], 2)[None, :33]
        x = batch["x"] @ params["even"]
        x = jnp.concatenate([jnp.tanh(x), jnp.broadcast_to(wide, (len(x), 33))], 1)
        rows = jnp.mean((x @ params["out"] - batch["y"]) ** 2, -1)
        return rows.mean(), rows

    (loss, rows), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    updates, opt = TX.update(grads, opt, params)
    params = optax.apply_updates(params, updates)
    return (params, opt), {"loss": loss, "rows": rows}


def local_step(step=step, **options: Any) -> shardfn.LocalStep:
    return shardfn.fully_shard(step, **({"min_size": 8} | options))


def assert_close(got: Any, expected: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def expected() -> Any:
    """The whole state and the metrics after two plain steps."""
    with jax.numpy_dtype_promotion("standard"):
        state = create(KEY)
        for _ in range(2):
            state, metrics = jax.jit(step)(state, BATCH)
    return jax.device_get((state, metrics))


def in_shard_map(fn: Callable, mesh, in_specs, out_specs, check_vma=True) -> Callable:
    """`fn` manual over all axes but "model"."""
    names = set(mesh.axis_names) - {"model"}
    mapped = jax.shard_map(
        fn,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=names,
        check_vma=check_vma,
    )
    return jax.jit(mapped)


def mesh_of(sizes: tuple[int, ...], names: tuple[str, ...], axis_type=AxisType.Auto):
    return jax.make_mesh(sizes, names, axis_types=(axis_type,) * len(sizes))


def two_steps(local, mesh, axes: Any, check_vma: bool) -> Any:
    """Init, two steps and unshard, each in a `shard_map` of its own."""
    specs = local.specs(jax.eval_shape(create, KEY), mesh)
    rows, metrics = P(axes), METRICS | {"rows": P(axes)}
    options = {"mesh": mesh, "check_vma": check_vma}
    init = in_shard_map(
        lambda key: local.init(create, key), in_specs=P(), out_specs=specs, **options
    )

    def by_either(state, batch):
        return local(state, batch=batch) if check_vma else local(state, batch)

    run = in_shard_map(
        by_either, in_specs=(specs, rows), out_specs=(specs, metrics), **options
    )
    whole = in_shard_map(local.unshard, in_specs=(specs,), out_specs=P(), **options)
    state = init(KEY)
    assert_close(whole(state), create(KEY))
    batch = jax.device_put(BATCH, NamedSharding(mesh, rows))
    for _ in range(2):
        state, measured = run(state, batch)
    return state, (whole(state), measured)


MESHES = {
    "8": ((8,), ("data",), "data"),
    "2x4 model": ((2, 4), ("model", "data"), "data"),
    "2x4 replica": ((2, 4), ("replica", "data"), ("replica", "data")),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kind", MESHES)
def test_shard_map(kind: str, check_vma: bool, expected) -> None:
    sizes, names, axes = MESHES[kind]
    local = local_step(axis=axes)
    state, got = two_steps(local, mesh_of(sizes, names), axes, check_vma)
    assert_close(got, expected)
    # What fills up the last shards is never seen, and never grows.
    odd, shards = state[0]["odd"], sizes[-1]
    assert odd.shape == (-(-33 // shards) * shards,)
    assert odd[:33].all() and not odd[33:].any()
    for leaf in jax.tree.leaves(state):
        part = leaf.addressable_shards[0].data.size
        assert part * shards == leaf.size or leaf.size < 8


# With one of two axes manual, jax 0.11 cannot lower a `psum_scatter` on explicit ones.
@pytest.mark.parametrize(
    "kind, axis_type", [("8", AxisType.Explicit), ("2x4 model", AxisType.Auto)]
)
def test_inside_set_mesh(kind: str, axis_type: AxisType, expected) -> None:
    sizes, names, axes = MESHES[kind]
    mesh = mesh_of(sizes, names, axis_type)
    with jax.set_mesh(mesh):
        assert_close(two_steps(local_step(), mesh, axes, True)[1], expected)


@pytest.mark.parametrize("check_vma", [True, False])
def test_one_state_per_group(check_vma: bool) -> None:
    """Another axis of the caller is manual too; its groups train states of their own,
    and nothing moves between them."""
    local, mesh = local_step(), mesh_of((2, 4), ("seed", "data"))
    keys = jax.random.split(KEY, 2)

    def train(key, batch):
        state = local.init(create, key[0])
        for _ in range(2):
            state, metrics = local(state, batch)
        out = local.unshard(state), metrics["loss"]
        return jax.tree.map(lambda x: x[None], out)

    mapped = in_shard_map(
        train, mesh, (P("seed"), P("data")), P("seed"), check_vma=check_vma
    )
    whole, losses = mapped(keys, BATCH)
    for seed in range(2):
        state = create(keys[seed])
        for _ in range(2):
            state, metrics = jax.jit(step)(state, BATCH)
        assert_close(jax.tree.map(lambda x: x[seed], whole), state)  # noqa: B023
        np.testing.assert_allclose(losses[seed], metrics["loss"], rtol=1e-5)


def test_pmap(expected) -> None:
    local = local_step()
    stacked = jax.tree.map(lambda x: x.reshape(8, 2, *x.shape[1:]), BATCH)
    make = jax.pmap(
        lambda key, _: local.init(create, key), axis_name="data", in_axes=(None, 0)
    )
    state = make(KEY, np.arange(8))
    run = jax.pmap(local, axis_name="data")
    for _ in range(2):
        state, metrics = run(state, stacked)
    assert state[0]["odd"].shape == (8, 5)
    whole = jax.pmap(local.unshard, axis_name="data")(state)
    for got, want in zip(
        jax.tree.leaves(whole), jax.tree.leaves(expected[0]), strict=True
    ):
        each = np.broadcast_to(want, (8, *want.shape))
        np.testing.assert_allclose(got, each, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(metrics["loss"], [expected[1]["loss"]] * 8, rtol=1e-5)
    rows = metrics["rows"].reshape(-1)
    np.testing.assert_allclose(rows, expected[1]["rows"], rtol=1e-5)


def test_the_whole_loop_in_one_shard_map(expected) -> None:
    """Shards, steps in a scan, and puts together again; nothing leaves the devices."""
    local, mesh = local_step(), mesh_of((8,), ("data",))

    def train(state, batch):
        state, metrics = lax.scan(
            lambda state, _: local(state, batch), local.shard(state), None, 2
        )
        return local.unshard(state), jax.tree.map(lambda x: x[-1], metrics)

    run = in_shard_map(train, mesh, (P(), P("data")), (P(), METRICS))
    assert_close(run(create(KEY), BATCH), expected)


def test_other_work_of_the_caller_on_shards() -> None:
    """A moving average of shards is the shards of the moving average."""
    local, mesh = local_step(), mesh_of((8,), ("data",))

    def train(state, batch):
        shards = local.shard(state)
        new, _ = local(shards, batch)
        mean = jax.tree.map(lambda a, b: (a + b) / 2, shards[0], new[0])
        return local.unshard((mean, new[1]))[0]

    got = in_shard_map(train, mesh, (P(), P("data")), P())(create(KEY), BATCH)
    new, _ = jax.jit(step)(create(KEY), BATCH)
    assert_close(got, jax.tree.map(lambda a, b: (a + b) / 2, create(KEY)[0], new[0]))


def test_a_batch_that_is_the_same_everywhere() -> None:
    """`batch_spec` names what is not split; its local shape is then the global one."""

    def scaled(state, batch):
        return {"w": state["w"] - batch["x"].sum(0) * batch["scale"]}, {}

    spec = {"scale": P()}
    local, mesh = local_step(scaled, batch_spec=spec), mesh_of((8,), ("data",))
    state = {"w": jnp.zeros(12)}
    batch = {"x": np.ones((16, 12), np.float32), "scale": np.arange(12.0, dtype="f4")}
    specs = {"x": P("data"), "scale": P()}
    run = in_shard_map(
        lambda s, b: local.unshard(local(local.shard(s), b)[0]), mesh, (P(), specs), P()
    )
    np.testing.assert_array_equal(run(state, batch)["w"], -16 * np.arange(12.0))


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_step_written_per_device(check_vma: bool) -> None:
    """Its own collectives mean what they mean around it."""

    def averaged(w, x):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - lax.pmean(grad, "data") / 8, lax.pmean(loss, "data")

    local, mesh = local_step(averaged), mesh_of((8,), ("data",))

    def train(w, x):
        w, loss = local(local.shard(w), x)
        return local.unshard(w), loss

    w = create(KEY)[0]["even"]
    run = in_shard_map(train, mesh, (P(), P("data")), P(), check_vma)
    grad_fn = jax.value_and_grad(lambda w: jnp.mean((BATCH["x"] @ w) ** 2))
    loss, grad = grad_fn(w)
    assert_close(run(w, BATCH["x"]), (w - grad / 8, loss))


# Errors


def test_two_states_that_look_the_same_are_refused_or_right() -> None:
    """Shards of 9 and of 10 rows have two rows each; padding is never averaged."""

    def smallest(state, x):
        return {"w": state["w"] + 1}, {"smallest": state["w"].min() + 0 * x.sum()}

    local, mesh = local_step(smallest), mesh_of((8,), ("data",))
    nine, ten = {"w": jnp.full((9,), 5.0)}, {"w": jnp.full((10,), 5.0)}
    specs = local.specs(nine, mesh)
    shards = in_shard_map(local.shard, mesh, P(), specs)(nine)
    local.specs(ten, mesh)
    run = in_shard_map(local, mesh, (specs, P("data")), (specs, P()))
    with contextlib.suppress(shardfn.ShardingError):
        assert run(shards, BATCH["x"])[1]["smallest"] == 5


def test_the_axis_has_to_be_bound() -> None:
    local = local_step()
    with pytest.raises(shardfn.ShardingError) as error:
        local(create(KEY), BATCH)
    message = str(error.value)
    assert "no mesh axis ('data',) is bound here" in message
    assert "test_local_step.py:" in message
    assert "inside jax.shard_map or jax.pmap over this axis" in message
    for method in (local.shard, local.init):
        with pytest.raises(shardfn.ShardingError, match="is bound here"):
            method(create, KEY) if method is local.init else method(create(KEY))


@pytest.mark.parametrize("method", ["__call__", "unshard"])
def test_an_unknown_state(method: str) -> None:
    local, mesh = local_step(), mesh_of((8,), ("data",))

    def use(state, batch):
        args = (state, batch) if method == "__call__" else (state,)
        return getattr(local, method)(*args)

    run = in_shard_map(use, mesh, (P(), P("data")), P(), check_vma=False)
    with pytest.raises(shardfn.ShardingError) as error:
        run(create(KEY), BATCH)
    message = str(error.value)
    assert "the state is not one that this step was given" in message
    assert "test_local_step.py:" in message
    assert "call step.specs(whole_state, mesh) before" in message


def test_specs_make_a_restored_state_known() -> None:
    """A state that another process sharded, such as one from a checkpoint."""
    first, second, mesh = local_step(), local_step(), mesh_of((8,), ("data",))
    state = create(KEY)
    specs = first.specs(state, mesh)
    shards = in_shard_map(first.shard, mesh, P(), specs)(state)
    assert second.specs(jax.eval_shape(create, KEY), mesh) == specs
    whole = in_shard_map(second.unshard, mesh, (specs,), P())(shards)
    jax.tree.map(np.testing.assert_array_equal, whole, state)


def test_it_prints_in_one_line() -> None:
    assert repr(local_step()) == "LocalStep(step over data)"
    two = local_step(axis=("replica", "data"))
    assert repr(two) == "LocalStep(step over replica, data)"
