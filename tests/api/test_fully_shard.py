"""In: plain steps and the options of `fully_shard`. Out: steps that are called, cached
and typed like the plain ones, and give the same results to the last bit.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import shardfn
from shardfn.storage._stored_array import stored_array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    w: Any
    count: Any


class Metrics(NamedTuple):
    loss: Any
    rows: Any


def make_state():
    w = jnp.asarray(np.random.default_rng(0).integers(-2, 3, (16, 5)), jnp.float32)
    return TrainState(w, jnp.int32(0))


X = np.random.default_rng(1).integers(-2, 3, (8, 16)).astype(np.float32)


def step(state, x):
    """One step on integers, so that every sum is exact."""
    loss, grad = jax.value_and_grad(lambda w: jnp.sum((x @ w) ** 2))(state.w)
    new = TrainState(state.w - grad / 2, state.count + 1)
    return new, Metrics(loss, (x @ state.w)[:, 0])


def mesh_of(kind: str) -> jax.sharding.Mesh:
    axis_type = AxisType.Auto if "auto" in kind else AxisType.Explicit
    if kind.startswith("2x4"):
        return jax.make_mesh((2, 4), ("model", "data"), (axis_type,) * 2)
    return jax.make_mesh((8,), ("data",), (axis_type,))


def sharded(step, mesh: str = "8", **options) -> shardfn.ShardedStep:
    return shardfn.fully_shard(step, mesh_of(mesh), **({"min_size": 8} | options))


@pytest.fixture(scope="module")
def shared() -> shardfn.ShardedStep:
    """One transform, compiled once for all tests that can use it."""
    return sharded(step, donate=False)


def assert_same(got, expected) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and a.weak_type == b.weak_type, (a.aval, b.aval)


# Forms


def test_called_with_the_step(shared) -> None:
    state, metrics = shared(make_state(), X)
    assert_same((shared.unshard(state), metrics), jax.jit(step)(make_state(), X))


def test_as_a_decorator() -> None:
    mesh = mesh_of("8")

    @shardfn.fully_shard(mesh=mesh, min_size=8)
    def decorated(state, x):
        return step(state, x)

    assert isinstance(decorated, shardfn.ShardedStep)
    state, metrics = decorated(make_state(), X)
    assert_same((decorated.unshard(state), metrics), jax.jit(step)(make_state(), X))


def test_it_looks_like_the_step(shared) -> None:
    assert shared.__name__ == "step"
    assert shared.__doc__ == "One step on integers, so that every sum is exact."
    assert shared.__wrapped__ is step
    assert shared.mesh == mesh_of("8")


@pytest.mark.parametrize("mesh", ["8-explicit", "8-auto"])
def test_meshes_of_both_axis_types(mesh: str) -> None:
    run = sharded(step, mesh)
    state = run.init(make_state)
    assert not stored_array(state.w).sharding.is_fully_replicated
    state, metrics = run(state, X)
    assert_same((run.unshard(state), metrics), jax.jit(step)(make_state(), X))


@pytest.mark.parametrize("mesh", ["2x4-explicit", "2x4-auto"])
def test_other_mesh_axes_stay_automatic(mesh: str) -> None:
    run = sharded(step, mesh)
    state = run.init(make_state)
    assert state.w.sharding.spec == P("data")
    state, metrics = run(state, X)
    assert stored_array(state.w).addressable_shards[0].data.shape == (4, 5)
    assert_same((run.unshard(state), metrics), jax.jit(step)(make_state(), X))


# Arguments


def test_the_state_in_second_position() -> None:
    run = sharded(lambda x, state: step(state, x), state_argnums=1)
    state, metrics = run(X, make_state())
    assert_same((run.unshard(state), metrics), jax.jit(step)(make_state(), X))


@pytest.mark.parametrize("make", [make_state, lambda: jnp.ones((16, 8))])
def test_the_state_alone_comes_back(make: Any) -> None:
    """A single array, too, which may be a batch unless a position is given."""

    def decay(state: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda a: a * (1 + x.mean()).astype(a.dtype), state)

    run = sharded(decay, state_argnums=0)
    state = run(run.shard(make()), X)
    assert_same(run.unshard(state), jax.jit(decay)(make(), X))
    largest = max(jax.tree.leaves(state), key=jnp.size)
    assert not stored_array(largest).sharding.is_fully_replicated


@pytest.mark.parametrize("argnums", [(0, 2), (2, 0)])
def test_two_states(argnums: tuple[int, int]) -> None:
    def two(a, x, b):
        a, metrics = step(a, x)
        states = {0: a, 2: {"w": b["w"] + 1, "sum": b["sum"] + x.sum()}}
        return *(states[i] for i in argnums), metrics

    def make_other():
        return {"w": jnp.ones((16, 3)), "sum": jnp.float32(0)}

    run = sharded(two, state_argnums=argnums)
    args = run.init(make_state), X, run.init(make_other)
    *states, metrics = run(*args)
    expected = jax.jit(two)(make_state(), X, make_other())
    for state, plain in zip(states, expected, strict=False):
        assert_same(run.unshard(state), plain)
        largest = max(jax.tree.leaves(state), key=jnp.size)
        assert not stored_array(largest).sharding.is_fully_replicated
    assert_same(metrics, expected[2])


def test_arguments_by_name_run_the_same_program() -> None:
    """Also those that can only be named, and those behind one that is left out."""
    traces = []

    def masked(state, x, by=None, mask=None, *, shift):
        traces.append(sorted(shift))
        x = x if by is None else x * by
        return step(state, x * mask + shift["one"])

    args = {"mask": np.arange(8.0, dtype=np.float32)[:, None], "shift": {"one": 2.0}}
    spec = (None, {"shift": {"one": P()}})
    run = sharded(masked, donate=False, batch_spec=spec)
    expected = jax.jit(masked)(make_state(), x=X, **args)
    for state, metrics in (
        run(make_state(), X, **args),
        run(shift=args["shift"], x=X, mask=args["mask"], state=make_state()),
    ):
        assert_same((run.unshard(state), metrics), expected)
    assert run.plan(make_state(), X, **args) == run.plan(state=state, x=X, **args)
    run.lower(make_state(), x=X, **args)
    assert len(traces) == 2, "by jax.jit, and once for all calls"


def test_a_step_that_takes_all_arguments_by_name() -> None:
    """`jax.jit` donates by position, of which the step has none."""

    def named(*, state, x):
        return step(state, x)

    run = sharded(named)
    plain, state = make_state(), run.shard(make_state())
    for _ in range(2):
        plain, expected = jax.jit(step)(plain, X)
        before, (state, metrics) = state, run(x=X, state=state)
        assert_same((run.unshard(state), metrics), (plain, expected))
    assert all(x.is_deleted() for x in map(stored_array, jax.tree.leaves(before)))
    run.lower(x=X, state=state).compile()


def test_a_call_by_name_is_the_call_by_position(shared) -> None:
    state, _ = shared(make_state(), X)
    compiled = [jitted._cache_size() for jitted in shared.programs._jitted.values()]
    assert_same(shared(x=X, state=state), shared(state, X))
    again = [jitted._cache_size() for jitted in shared.programs._jitted.values()]
    assert again == compiled


def test_an_option_that_partial_binds_leaves_the_rest_to_be_named() -> None:
    from functools import partial

    def configured(state, config, x):
        return step(state, x if config == "plain" else -x)

    run = sharded(partial(configured, config="plain"))
    state, metrics = run(make_state(), x=X)
    assert_same((run.unshard(state), metrics), jax.jit(step)(make_state(), X))


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_keys_and_numbers_in_the_batch(make_key) -> None:
    """Each device makes its rows of the global bits; Python numbers stay weak."""

    def noisy(state, batch, scale, key):
        noise = jax.random.bernoulli(key, 0.5, batch["x"].shape)
        x = jnp.where(noise, batch["x"] * scale, batch["shift"])
        return step(state, x)

    batch = {"x": X, "shift": np.float32(1)}
    args = batch, 2.0, make_key(3)
    run = sharded(noisy)
    state, metrics = run(make_state(), *args)
    expected = jax.jit(noisy)(make_state(), *args)
    assert_same((run.unshard(state), metrics), expected)


@pytest.mark.parametrize(
    "spec",
    [P(), P(None, "data"), {"x": P()}, {"x": P(None, "data"), "y": None}, {"y": P()}],
    ids=str,
)
def test_any_batch_spec_gives_the_same_results(spec) -> None:
    def both(state, batch):
        return step(state, batch["x"] + batch["y"])

    batch = {"x": X, "y": np.ones_like(X)}
    run = sharded(both, batch_spec=spec)
    state, metrics = run(make_state(), batch)
    assert_same((run.unshard(state), metrics), jax.jit(both)(make_state(), batch))


def test_batch_spec_of_several_arguments() -> None:
    def both(state, x, table):
        return step(state, x @ table)

    table = np.eye(16, dtype=np.float32)[::-1]
    run = sharded(both, batch_spec=(None, P()))
    state, metrics = run(make_state(), X, table)
    assert_same((run.unshard(state), metrics), jax.jit(both)(make_state(), X, table))


# Tracing


def test_the_step_is_traced_once_per_shapes() -> None:
    traces = []

    def counted(state, x):
        traces.append(x.shape)
        return step(state, x)

    run = sharded(counted, donate=False)
    state = run.init(make_state)
    new, _ = run(state, X)
    run(new, X)
    run(make_state(), jnp.asarray(X))
    run.plan(state, X)
    run.lower(state, X)
    assert traces == [(8, 16)]
    run(state, np.tile(X, (2, 1)))
    run(new, X)
    assert traces == [(8, 16), (16, 16)]
    with jax.default_matmul_precision("highest"):
        assert "HIGHEST" in run.lower(state, X).as_text()
    assert traces == [(8, 16), (16, 16), (8, 16)], "and per configuration of JAX"


def test_the_compiled_step_is_reused(shared) -> None:
    state, _ = shared(shared.init(make_state), X)
    assert repr(shared) == f"ShardedStep({shared.__name__} over data=8)"
    ((key, jitted),) = shared.programs._jitted.items()
    size = jitted._cache_size()
    shared(shared(state, X)[0], X)
    assert jitted._cache_size() == size
    assert shared.programs._jitted[key] is jitted


def test_lower_takes_shapes_alone(shared) -> None:
    state = jax.eval_shape(make_state)
    lowered = shared.lower(state, jax.ShapeDtypeStruct(X.shape, X.dtype))
    assert isinstance(lowered, jax.stages.Lowered)
    for name in ("jit_step", "all_gather", "reduce_scatter", "all_reduce"):
        assert name in lowered.as_text()


def test_lowering_compiles_to_what_the_call_runs(shared) -> None:
    state = shared.init(make_state)
    batch = jax.device_put(
        X, jax.sharding.NamedSharding(shared.storage.mesh, P("data"))
    )
    compiled = shared.lower(state, X).compile()
    new, metrics = compiled(jax.tree.leaves(state), (batch,))
    assert_same((new, metrics), shared(state, X))


# Results


def test_rows_come_back_split_and_scalars_replicated(shared) -> None:
    state, metrics = shared(make_state(), X)
    assert metrics.rows.sharding.spec == P("data")
    assert {s.data.shape for s in metrics.rows.addressable_shards} == {(1,)}
    assert metrics.loss.sharding.is_fully_replicated
    assert state.count.sharding.is_fully_replicated
    assert state.w.sharding == shared.shardings(make_state()).w


def test_pytree_types_are_kept(shared) -> None:
    out = shared(make_state(), X)
    assert type(out) is tuple
    assert type(out[0]) is TrainState and type(out[1]) is Metrics
    assert type(shared.init(make_state)) is TrainState
    assert type(shared.unshard(out[0])) is type(shared.shardings(out[0])) is TrainState


def test_a_result_that_an_argument_is() -> None:
    def passing(state, x):
        return state, {"x": x, "again": x, "w": state["w"], "one": jnp.float32(1)}

    run = sharded(passing, donate=False)
    whole = {"w": jnp.arange(16.0), "padded": jnp.arange(17.0)}
    state, metrics = run(whole, X)
    assert_same(run.unshard(state), whole)
    assert_same(metrics, jax.jit(passing)(whole, X)[1])


def test_a_padded_result_comes_back_whole() -> None:
    """Padding is storage; what is not state never shows it."""

    def copying(state, x):
        return state, {"w": state["w"] * 2, "max": state["w"].max(0)}

    run = sharded(copying, donate=False)
    whole = {"w": -jnp.ones((17, 3))}
    state, metrics = run(whole, X)
    assert state["w"].array.shape == (56,)
    assert_same(metrics, jax.jit(copying)(whole, X)[1])


def test_weak_types() -> None:
    """A Python number in the state stays weak, and a step that drops that is traced for
    the new type and goes on."""

    def weak(state, x, rate):
        new = {"rate": state["rate"] * 0.5, "w": state["w"] - state["rate"] * x.sum()}
        return new, {"weak": state["rate"] * 2.0, "given": rate + 1, "strong": x.sum()}

    run = sharded(weak, donate=False)
    whole = {"rate": jnp.asarray(0.5), "w": jnp.ones((16, 2))}
    assert whole["rate"].weak_type
    state = run.shard(whole)
    assert state["rate"].weak_type
    for _ in range(2):
        state, metrics = run(state, X, 1)
        whole, expected = jax.jit(weak)(whole, X, 1)
        assert_same(metrics, expected)
        assert_same(run.unshard(state), whole)


def test_constants_of_calls() -> None:
    """A jitted function that closes over an array, in a step for all devices or one."""
    table = jnp.arange(5.0)

    @jax.jit
    def shifted(x):
        return x + table

    def plain(w, x):
        return w, shifted(x @ w).sum()

    def of_each_device(w, x):
        return w, jax.lax.psum(shifted(x @ w).sum(), "data")

    w = make_state().w
    loss = jax.jit(plain)(w, X)[1]
    for each in (plain, of_each_device):
        assert sharded(each)(w, X)[1] == loss
