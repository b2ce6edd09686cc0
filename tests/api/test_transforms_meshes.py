"""In: a sharded step on meshes of all kinds, set or not. Out: the plain results, each
print once, tensor-parallel inputs, and results that mix with the caller's own arrays.
"""

import contextlib
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import shardfn

X = np.random.default_rng(1).integers(-2, 3, (16, 12)).astype(np.float32)
XS = np.stack([X, X[::-1], X])
MESHES = {
    "data": ((8,), ("data",), "data"),
    "hybrid": ((2, 4), ("replica", "data"), ("replica", "data")),
    "model": ((4, 2), ("data", "model"), "data"),
    "all": ((2, 2, 2), ("replica", "data", "model"), ("replica", "data")),
}
TYPES = [AxisType.Auto, AxisType.Explicit]


def create() -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    return {
        "in": jnp.asarray(rng.integers(-2, 3, (12, 8)), jnp.float32),
        "odd": jnp.asarray(rng.integers(-2, 3, (9,)), jnp.float32),
        "out": jnp.asarray(rng.integers(-2, 3, (8, 4)), jnp.float32),
    }


STATE = jax.device_get(create())


def step(state, x):
    """One step on integers, so that every sum is exact."""

    def loss_fn(state):
        rows = jnp.sum((jax.nn.relu(x @ state["in"]) @ state["out"]) ** 2, -1)
        return rows.mean() + (state["odd"] ** 2).sum(), rows

    (loss, rows), grads = jax.value_and_grad(loss_fn, has_aux=True)(state)
    new = jax.tree.map(lambda p, g: p - g / 64, state, grads)
    return new, {"loss": loss, "rows": rows}


def make(kind: str, axis_type: AxisType, step=step) -> shardfn.ShardedStep:
    sizes, names, axis = MESHES[kind]
    mesh = jax.make_mesh(sizes, names, axis_types=(axis_type,) * len(sizes))
    return shardfn.fully_shard(step, mesh, axis=axis, min_size=8, donate=False)


def assert_step(run, out: Any) -> None:
    state, metrics = out
    got, expected = (run.unshard(state), metrics), plain()
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@functools.cache
def plain() -> Any:
    """What one step gives on one device, on the host."""
    with jax.set_mesh(jax.make_mesh((1,), ("one",), devices=jax.devices()[:1])):
        return jax.device_get(jax.jit(step)(STATE, X))


each_mesh = pytest.mark.parametrize("kind", MESHES)
each_type = pytest.mark.parametrize("axis_type", TYPES, ids=["auto", "explicit"])


@pytest.mark.covering(2)
@each_type
@pytest.mark.parametrize("kind", ["data", "all"])
@pytest.mark.parametrize("is_set", [True, False], ids=["set_mesh", "no mesh"])
def test_from_init_to_unshard(kind: str, axis_type: AxisType, is_set: bool) -> None:
    """All of it, traced in the caller's mesh context."""
    run = make(kind, axis_type)
    with jax.set_mesh(run.mesh) if is_set else contextlib.nullcontext():
        state = run.init(create)
        jax.tree.map(np.testing.assert_array_equal, run.unshard(state), STATE)
        assert_step(run, run(state, X))
        assert_step(run, jax.jit(run)(state, X))
        assert run.plan(STATE, X).collectives
        assert "reduce_scatter" in run.lower(state, X).as_text()


@pytest.mark.covering(1)
@each_type
@pytest.mark.parametrize("is_set", [True, False], ids=["set_mesh", "no mesh"])
def test_scan_in_a_mesh_context(axis_type: AxisType, is_set: bool) -> None:
    run = make("data", axis_type)
    expected = jax.device_get(jax.jit(lambda s: lax.scan(step, s, XS))(STATE))
    with jax.set_mesh(run.mesh) if is_set else contextlib.nullcontext():
        state, metrics = jax.jit(lambda s: lax.scan(run, s, XS))(run.shard(STATE))
        got = run.unshard(state), metrics
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, got, expected)


def scanned(step):
    return lambda state, x: lax.scan(step, state, jnp.stack([x, x[::-1]]))


def of_seeds(step):
    def many(state, x):
        states = jax.tree.map(lambda w: jnp.stack([w, w + 1]), state)
        return jax.vmap(step, (0, None))(states, x)[1]

    return many


def derivative(step):
    def loss(state, x):
        return jax.checkpoint(step)(state, x)[1]["loss"]

    return jax.grad(loss, argnums=1)


@pytest.mark.covering(2)
@each_type
@pytest.mark.parametrize("kind", ["hybrid", "all"])
@pytest.mark.parametrize("transformed", [scanned, of_seeds, derivative])
def test_transforms_on_meshes_of_more_axes(transformed, kind: str, axis_type) -> None:
    run = make(kind, axis_type)
    state = run.shard(STATE) if transformed is scanned else STATE
    got = jax.jit(transformed(run))(state, X)
    expected = jax.jit(transformed(step))(STATE, X)
    if transformed is scanned:
        got = run.unshard(got[0]), got[1]
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, got, expected)


@pytest.mark.covering(2)
@each_type
@pytest.mark.parametrize("spec", [P(), P("data"), P(None, "data")], ids=str)
@pytest.mark.parametrize("jit", [True, False], ids=["jit", "call"])
def test_a_batch_that_is_placed(axis_type: AxisType, spec: P, jit: bool) -> None:
    """However the caller's batch is split, also as part of its type."""
    run = make("model", axis_type)
    batch = jax.device_put(X, NamedSharding(run.mesh, spec))
    fn = jax.jit(run) if jit else run
    assert_step(run, fn(run.shard(STATE), batch))


@each_type
@pytest.mark.parametrize("jit", [True, False], ids=["jit", "call"])
def test_results_mix_with_the_callers_arrays(axis_type: AxisType, jit: bool) -> None:
    run = make("data", axis_type)
    batch = jax.device_put(X, NamedSharding(run.mesh, P("data")))
    one = jax.device_put(jnp.float32(1), NamedSharding(run.mesh, P()))

    def fn(state, batch, one):
        metrics = run(state, batch)[1]
        return metrics["loss"] + one, metrics["rows"] + batch[:, 0]

    loss, rows = (jax.jit(fn) if jit else fn)(run.shard(STATE), batch, one)
    expected = plain()[1]
    assert loss == expected["loss"] + 1
    np.testing.assert_array_equal(rows, expected["rows"] + X[:, 0])
    assert rows.sharding.spec == P("data")


# Arrays that a step captures, and meshes that it names


@pytest.mark.covering(2)
@each_type
@pytest.mark.parametrize("spec", [P(), P("data"), P(None, "data")], ids=str)
@pytest.mark.parametrize("kind", ["data", "all"])
@pytest.mark.parametrize("is_set", [True, False], ids=["set_mesh", "no mesh"])
def test_captured_arrays(kind: str, axis_type, spec: P, is_set: bool) -> None:
    """They may be placed on the mesh, and typed by it, as masks and tables are."""
    run = make(kind, axis_type)
    table = np.arange(16 * 8, dtype=np.float32).reshape(16, 8) % 5 - 2
    placed = jax.device_put(table, NamedSharding(run.mesh, spec))

    def captures(table):
        def captured(state, x):
            new, metrics = step(state, x)
            times = jnp.sum(table) + jnp.sum(table.T @ x)
            return new, metrics | {"times": times, "rows": (x[:, :8] * table).sum(1)}

        return captured

    with jax.set_mesh(run.mesh) if is_set else contextlib.nullcontext():
        run = make(kind, axis_type, captures(placed))
        state, metrics = run(STATE, X)
        whole = run.unshard(state)
    expected = jax.jit(captures(table))(STATE, X)
    jax.tree.map(np.testing.assert_array_equal, (whole, metrics), expected)


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "call"])
def test_a_constraint_by_axis_names(jit: bool) -> None:
    """`with_sharding_constraint` on axes of the mesh that is set; those that are
    sharded over here say nothing new."""

    def constrained(state, x):
        wide = lax.with_sharding_constraint(x @ state["in"], P("data", "model"))
        new, metrics = step(state, x)
        return new, metrics | {"wide": wide.sum()}

    run = make("model", AxisType.Auto, constrained)
    with jax.set_mesh(run.mesh):
        _, metrics = (jax.jit(run) if jit else run)(run.shard(STATE), X)
        text = run.lower(STATE, X).as_text()
    assert metrics["wide"] == (X @ STATE["in"]).sum()
    assert re.search(r'sharding_constraint.*"model"', text)


# Tensor parallelism


@pytest.mark.covering(2)
@each_type
@pytest.mark.parametrize("kind", ["model", "all"])
@pytest.mark.parametrize("jit", [True, False], ids=["jit", "call"])
def test_tensor_parallel_parameters(kind: str, axis_type, jit: bool) -> None:
    run = make(kind, axis_type)
    specs = {"in": P(None, "model"), "odd": P(), "out": P("model", None)}
    named = {name: NamedSharding(run.mesh, spec) for name, spec in specs.items()}
    state = jax.device_put(STATE, named)
    assert_step(run, (jax.jit(run) if jit else run)(state, X))


# Printing


def printing(state, x):
    new, metrics = step(state, x)
    jax.debug.print("loss {loss:.1f}", loss=metrics["loss"])
    jax.debug.callback(lambda high: print(f"high {high:.1f}"), metrics["rows"].max())
    return new, metrics


def printed(fn, capfd) -> list[str]:
    capfd.readouterr()
    jax.block_until_ready(fn())
    jax.effects_barrier()
    return sorted(x for x in capfd.readouterr().out.splitlines() if x[:4] in TAGS)


TAGS = ("loss", "high")


@each_mesh
def test_prints_happen_once(kind: str, capfd) -> None:
    run = make(kind, AxisType.Explicit, printing)
    once = printed(lambda: jax.jit(printing)(STATE, X), capfd)
    assert len(once) == 2
    assert printed(lambda: run(STATE, X), capfd) == once


def test_prints_in_a_scan_happen_once_per_step(capfd) -> None:
    run = make("data", AxisType.Explicit, printing)
    stored = run.shard(STATE)
    got = printed(lambda: jax.jit(lambda s: lax.scan(run, s, XS))(stored), capfd)
    plain = printed(lambda: jax.jit(lambda s: lax.scan(printing, s, XS))(STATE), capfd)
    assert len(got) == 6 and got == plain
