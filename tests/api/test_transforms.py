"""In: a sharded step under JAX's transforms. Out: what the plain step gives there."""

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from plan_helpers import cpu_mesh

import shardfn
from shardfn.storage._stored_array import stored_array
from shardfn.testing import assert_parity

X = np.random.default_rng(1).normal(size=(16, 12)).astype(np.float32)
XS = np.stack([X, X[::-1] / 2, X + 1])


def create(key: jax.Array) -> dict[str, jax.Array]:
    """`w` is stored padded: no dimension of it divides by 8."""
    w = jax.random.normal(key, (12, 5))
    return {"w": w, "mean": w / 2, "count": jnp.int32(0)}


STATE = jax.device_get(create(jax.random.key(0)))


def step(state, x):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
    mean = state["mean"] / 2 + grad
    new = {"w": state["w"] - mean / 8, "mean": mean, "count": state["count"] + 1}
    return new, {"loss": loss, "rows": (x @ state["w"])[:, 0]}


def mesh_of(kind: str = "explicit") -> Mesh:
    axis_type = AxisType.Auto if kind == "auto" else AxisType.Explicit
    return jax.make_mesh((8,), ("data",), axis_types=(axis_type,))


def sharded(step=step, mesh: Mesh | None = None, **options: Any) -> shardfn.ShardedStep:
    options = {"min_size": 8, "donate": False} | options
    return shardfn.fully_shard(step, mesh or mesh_of(), **options)


@pytest.fixture(scope="module")
def run() -> shardfn.ShardedStep:
    """One transform for all tests that can use it."""
    return sharded()


@pytest.fixture(scope="module")
def stored(run) -> Any:
    return run.shard(STATE)


def assert_close(got: Any, expected: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)


def assert_step(run, out: Any, expected: Any) -> None:
    state, metrics = out
    assert_close((run.unshard(state), metrics), expected)


# Meshes that are set


@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_a_state_made_inside_set_mesh_is_on_that_mesh(kind: str) -> None:
    """So eager operations take it there, and so do gradients through the step."""
    mesh = mesh_of(kind)
    ours = sharded(mesh=mesh)
    with jax.set_mesh(mesh):
        for state in (ours.shard(STATE), ours.init(lambda: STATE)):
            assert all(x.sharding.mesh == mesh for x in jax.tree.leaves(state))
        three = jax.device_put(jnp.float32(3), NamedSharding(mesh, P()))
        twice = jax.tree.map(lambda x: x + x, state | {"w": state["w"] * three})
        assert_close(jnp.sum(twice["mean"]), jnp.sum(2 * STATE["mean"]))
        new, metrics = ours(twice, X)
        assert next(reversed(ours._ready.values())).arrays(jax.tree.leaves(new))
        got = jax.grad(lambda w: ours(state | {"w": w}, X)[1]["loss"])(state["w"])
        whole = ours.unshard(new)
        assert_close(ours.unshard(ours.shard(whole)), whole)
    doubled = jax.tree.map(lambda x: x + x, STATE | {"w": STATE["w"] * 3})
    assert_close((whole, metrics), jax.jit(step)(doubled, X))
    expected = jax.grad(lambda w: step(STATE | {"w": w}, X)[1]["loss"])(STATE["w"])
    assert_close(got, expected)


def test_states_go_in_and_out_of_set_mesh(run, stored) -> None:
    """Calls outside and inside take the short way each, on the mesh of their own."""
    expected, _ = lax.scan(step, STATE, np.stack([X] * 3))
    with jax.set_mesh(run.mesh):
        state, _ = run(stored, X)
        assert state["w"].sharding.mesh == run.mesh
    state, _ = run(state, X)
    assert state["w"].sharding.mesh != run.mesh
    with jax.set_mesh(run.mesh):
        state, _ = run(state, X)
        jax.tree.map(jnp.sum, state)
    assert_close(run.unshard(state), expected)


# jit, loops, vmap


@pytest.mark.parametrize("placed", [True, False], ids=["stored", "whole"])
def test_jit(run, stored, placed: bool) -> None:
    out = jax.jit(run)(stored if placed else STATE, X)
    assert_step(run, out, jax.jit(step)(STATE, X))
    assert out[0]["w"].shape == (12, 5), "whole, as any result of the caller's jit"


def test_jit_that_donates(run) -> None:
    state = run.shard(STATE)
    out = jax.jit(run, donate_argnums=0)(state, X)
    assert state["count"].is_deleted()
    assert not state["w"].is_deleted(), "the caller's jit was given a copy put together"
    assert_step(run, out, jax.jit(step)(STATE, X))


def test_donation_inside_jit_is_the_callers() -> None:
    run = sharded(donate=True)
    state = run.shard(STATE)
    out = jax.jit(run)(state, X)
    assert not state["w"].is_deleted()
    assert_step(run, out, jax.jit(step)(STATE, X))


@pytest.mark.parametrize("jit", [True, False])
def test_scan_over_steps(run, stored, jit: bool) -> None:
    def many(step):
        return lambda state, xs: lax.scan(step, state, xs)

    train = jax.jit(many(run)) if jit else many(run)
    assert_step(run, train(stored, XS), jax.jit(many(step))(STATE, XS))


def test_while_and_cond_around_steps(run, stored) -> None:
    def until(step):
        def body(state):
            return lax.cond(
                state["count"] < 2,
                lambda s: step(s, XS[0])[0],
                lambda s: step(s, XS[1])[0],
                state,
            )

        return lambda state: lax.while_loop(lambda s: s["count"] < 4, body, state)

    got = run.unshard(jax.jit(until(run))(stored))
    assert_close(got, jax.jit(until(step))(STATE))


def each(count: int, fn, tree: Any) -> Any:
    """`fn` of every state in a stack of states, stacked on the host."""

    def one(i: int) -> Any:
        return jax.device_get(fn(jax.tree.map(lambda x: x[i], tree)))

    return jax.tree.map(lambda *x: np.stack(x), *map(one, range(count)))


@pytest.mark.parametrize("per_seed_batch", [True, False])
def test_vmap_over_seeds(run, per_seed_batch: bool) -> None:
    keys = jax.random.split(jax.random.key(1), 3)
    states = jax.vmap(lambda key: run.init(create, key))(keys)
    assert states["w"].shape == (3, 12, 5)
    axes = (0, 0 if per_seed_batch else None)
    xs = XS if per_seed_batch else X
    new, metrics = jax.vmap(run, axes)(states, xs)
    expected = jax.jit(jax.vmap(step, axes))(jax.vmap(create)(keys), xs)
    assert_close((each(3, run.unshard, new), metrics), jax.device_get(expected))


def test_vmap_over_learning_rates() -> None:
    def scaled(state, x, rate):
        new, metrics = step(state, x)
        w = state["w"] - rate * (state["w"] - new["w"])
        return new | {"w": w}, metrics

    run, rates = sharded(scaled), jnp.array([1.0, 0.5])
    new, _ = jax.vmap(run, (None, None, 0))(run.shard(STATE), X, rates)
    expected, _ = jax.jit(jax.vmap(scaled, (None, None, 0)))(STATE, X, rates)
    assert_close(each(2, run.unshard, new)["w"], expected["w"])


# Derivatives


def loss_of(step, state=STATE):
    return lambda w, x: step(state | {"w": w}, x)[1]["loss"]


def after_two(step, state=STATE):
    """A loss after two updates, as in meta-learning."""

    def loss(w, x):
        state_1, _ = step(state | {"w": w}, x)
        return step(state_1, x)[1]["loss"]

    return loss


W = STATE["w"]
DERIVATIVES = {
    "grad": lambda f: jax.grad(f)(W, X),
    "grad of the batch": lambda f: jax.grad(f, argnums=1)(W, X),
    "jit of grad": lambda f: jax.jit(jax.grad(f))(W, X),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f))(W, X),
    "jvp": lambda f: jax.jvp(f, (W, X), (W[::-1], X)),
    "hvp": lambda f: jax.jvp(lambda w: jax.grad(f)(w, X), (W,), (W[::-1],))[1],
    "linearize": lambda f: jax.linearize(f, W, X)[1](W[::-1], X),
}


@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_derivatives(run, derivative: str) -> None:
    got = DERIVATIVES[derivative](loss_of(run))
    assert_close(got, DERIVATIVES[derivative](loss_of(step)))


def test_a_derivative_through_updates(run) -> None:
    assert_close(jax.grad(after_two(run))(W, X), jax.grad(after_two(step))(W, X))


def test_the_gradient_of_a_stored_state(run, stored) -> None:
    """Has the shape of the leaf, whatever shape that is stored in."""
    grads = jax.grad(lambda s: run(s, X)[1]["loss"], allow_int=True)(stored)
    got, expected = grads["w"], jax.grad(loss_of(step))(W, X)
    assert stored_array(stored["w"]).shape == (64,)
    assert_close(got, expected)


def test_the_gradient_of_one_stored_leaf() -> None:
    """The other leaves are arrays, not tracers."""
    run = sharded()
    stored = run.shard(STATE)
    got = jax.grad(loss_of(run, stored))(stored["w"], X)
    assert_close(got, jax.grad(loss_of(step))(W, X))


# Shapes and export


def test_eval_shape(run, stored) -> None:
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), STATE)
    for state in (stored, abstract):
        new, metrics = jax.eval_shape(run, state, X)
        assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, stored)
        expected = jax.eval_shape(step, STATE, X)[1]
        assert jax.tree.map(_type, metrics) == jax.tree.map(_type, expected)


def _type(x: Any) -> tuple[Any, ...]:
    return x.shape, x.dtype


def test_export(run, stored) -> None:
    exported = jax.export.export(jax.jit(run))(stored, X)
    again = jax.export.deserialize(exported.serialize())
    assert again.nr_devices == 8
    placed = jax.device_put(X, NamedSharding(run.mesh, P("data")))
    assert_step(run, again.call(stored, placed), jax.jit(step)(STATE, X))


def by_platform(x):
    return jax.lax.platform_dependent(x, cpu=jnp.tanh, tpu=jnp.sin, default=jnp.cos)


@jax.custom_vjp
def by_platform_both_ways(x):
    return by_platform(x)


by_platform_both_ways.defvjp(
    lambda x: (by_platform(x), x), lambda x, g: (g * by_platform(x),)
)


@pytest.mark.parametrize(
    "function",
    [
        by_platform,
        by_platform_both_ways,
        jax.vmap(by_platform),
        jax.checkpoint(by_platform),
        lambda x: jax.lax.cond(x.sum() > 0, by_platform, jnp.sin, x),
        lambda x: jax.lax.fori_loop(0, 3, lambda _, h: by_platform(h), x),
    ],
)
def test_the_branch_of_a_platform_is_lowered_for_no_other(function) -> None:
    """Of what others run, nothing is known: neither what it reads nor its sums."""

    def step(w, x):
        loss = lambda w: jnp.square(function(x @ w)).mean()  # noqa: E731
        value, grad = jax.value_and_grad(loss)(w)
        return w - grad, value

    args = jnp.ones((6, 5)) / 7, jnp.ones((16, 6))
    assert_parity(step, cpu_mesh(8), *args, min_size=0)
    run = shardfn.fully_shard(step, cpu_mesh(8), min_size=0)
    jax.export.export(jax.jit(run))(*args)
    assert jax.make_jaxpr(jax.grad(lambda w: run(w, args[1])[1]))(args[0])
    words = "sharded over cpu devices is lowered for tpu, where .*platform_dependent"
    with pytest.raises(shardfn.ShardingError, match=words):
        jax.export.export(jax.jit(run), platforms=["tpu"])(*args)


def test_on_a_mesh_without_devices_every_platform_has_its_branch() -> None:
    """Nothing says there what it will be lowered for."""

    def step(w, x):
        value, grad = jax.value_and_grad(
            lambda w: jnp.square(by_platform(x @ w)).sum()
        )(w)
        return w - grad, value

    local = shardfn.fully_shard(step, axis="data", min_size=0)
    state = jax.ShapeDtypeStruct((16, 16), jnp.float32)

    def on_one_device(w, x):
        return local.with_state(state)(w, x)

    mesh = jax.sharding.AbstractMesh((8,), ("data",))
    split = NamedSharding(mesh, P("data"))
    run = jax.shard_map(
        on_one_device,
        mesh=mesh,
        in_specs=(P("data"), P("data")),
        out_specs=(P("data"), P()),
        check_vma=False,
    )
    args = (
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split) for x in (state,) * 2
    )
    text = jax.export.export(jax.jit(run), platforms=["tpu"])(*args).mlir_module()
    assert "stablehlo.sine" in text


ELSEWHERE = """
import sys
import jax, numpy as np
from jax import export
jax.config.update("jax_num_cpu_devices", 8)
step = export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
given = np.load(sys.argv[2])
mesh = jax.make_mesh((8,), ("data",))
args = [given[str(i)] for i in range(len(given))]
args = jax.tree.map(jax.device_put, args, list(step.in_shardings_jax(mesh)))
args, kwargs = jax.tree.unflatten(step.in_tree, args)
out = jax.tree.leaves(step.call(*args, **kwargs))
np.savez(sys.argv[2], *out)
assert "shardfn" not in sys.modules
"""


def test_export_to_another_process(tmp_path) -> None:
    """Where the package need not be installed, on a mesh with explicit axes."""
    run = sharded()
    with jax.set_mesh(run.mesh):
        stored = run.shard(STATE)
        placed = jax.device_put(X, NamedSharding(run.mesh, P("data")))
        exported = jax.export.export(jax.jit(run))(stored, placed)
    program, arrays = tmp_path / "step.bin", tmp_path / "arrays.npz"
    program.write_bytes(exported.serialize())
    leaves = jax.tree.leaves((stored, X))
    np.savez(arrays, **{str(i): x for i, x in enumerate(leaves)})
    args = [sys.executable, "-c", ELSEWHERE, str(program), str(arrays)]
    subprocess.run(args, check=True, cwd=tmp_path)
    with np.load(arrays) as found:
        out = [found[f"arr_{i}"] for i in range(len(found))]
    assert_close(jax.tree.unflatten(exported.out_tree, out), run(stored, X))
