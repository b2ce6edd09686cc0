"""In: steps with modules of flax.nnx among their arguments, as under `nnx.jit`. Out:
the caller's modules with the values that `nnx.jit` gives, stored split; or an error.
"""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import shardfn

MESH = jax.make_mesh(
    (2,),
    ("data",),
    axis_types=(jax.sharding.AxisType.Auto,),
    devices=jax.devices()[:2],
)
X = jnp.arange(96.0).reshape(16, 6) % 5 / 5
Y = jnp.arange(16) % 3

pytestmark = pytest.mark.standard_promotion


class Net(nnx.Module):
    """9 and 13 are divided by no mesh: such leaves are stored padded."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(6, 13, rngs=rngs)
        self.norm = nnx.BatchNorm(13, use_bias=False, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.last = nnx.Linear(13, 9, rngs=rngs)

    def __call__(self, x):
        return self.last(self.drop(jnp.tanh(self.norm(self.first(x)))))


class Tied(nnx.Module):
    """One variable in two layers, and one layer in two places."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(6, 16, rngs=rngs)
        self.last = nnx.Linear(6, 16, use_bias=False, rngs=rngs)
        self.last.kernel = self.first.kernel
        self.again = nnx.List([nnx.Linear(16, 16, rngs=rngs)] * 2)

    def __call__(self, x):
        x = self.again[1](jnp.tanh(self.again[0](self.first(x))))
        return x @ self.last.kernel[...].T


class Small(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(6, 9, rngs=rngs)

    def __call__(self, x):
        return self.first(x)


class NoPytree(Small, pytree=False):
    """One that JAX cannot take apart."""


def loss_fn(model, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


def train(model, optimizer, metrics, x, *, y):
    loss, grads = nnx.value_and_grad(loss_fn)(model, x, y)
    optimizer.update(model, grads)
    metrics.update(loss=loss)
    return {"loss": loss, "inner": model.first}


def train_and_return(model, optimizer, metrics, x, *, y):
    train(model, optimizer, metrics, x, y=y)
    return model, optimizer, metrics


def evaluate(x, model, y):
    return loss_fn(model, x, y)


def make(kind=Net):
    model = kind(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    return model, optimizer, nnx.MultiMetric(loss=nnx.metrics.Average("loss"))


def sharded(step, **options) -> shardfn.ShardedStep:
    return shardfn.fully_shard(step, MESH, min_size=8, **options)


def values(modules) -> dict[str, np.ndarray]:
    flat = jax.tree_util.tree_flatten_with_path(nnx.state(modules))[0]
    words = (
        (jax.tree_util.keystr(path), jax.random.key_data(x) if is_key(x) else x)
        for path, x in flat
    )
    return {name: np.asarray(x) for name, x in words}


def is_key(x) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def assert_like(modules, others) -> None:
    got, expected = values(modules), values(others)
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_allclose(got[name], x, 1e-5, 1e-6, err_msg=name)


@pytest.mark.parametrize(
    "step, kind",
    [(train, Net), *((train_and_return, kind) for kind in (Small, NoPytree, Tied))],
)
def test_modules_are_updated_as_under_nnx_jit(step, kind) -> None:
    plain, ours, run = make(kind), make(kind), sharded(step)
    jitted = nnx.jit(step)
    for _ in range(3):
        expected = jitted(*plain, X, y=Y)
        got = run(*ours, X, y=Y)
        if step is train:
            np.testing.assert_allclose(got["loss"], expected["loss"], 1e-5)
            assert got["inner"] is ours[0].first
        else:  # as pytrees, unless variables are shared
            assert (got[0] is ours[0]) == (kind is not Small)
            ours = got
    assert_like(ours, plain)
    kernel = ours[0].first.kernel.get_value()
    assert {2 * x.data.size for x in kernel.addressable_shards} == {kernel.size}
    in_place = kind is not Small
    assert ("updates model, optimizer, metrics in place" in repr(run)) == in_place
    if kind is Tied:
        assert ours[0].last.kernel is ours[0].first.kernel
        assert ours[0].again[0] is ours[0].again[1]


def test_paths_plans_and_options_name_the_arguments() -> None:
    run = sharded(train, shard={"optimizer": False})
    modules = make(Tied)
    plan = run.plan(*modules, X, y=Y)
    paths = {c.path for c in plan.collectives if c.op == "all_gather"}
    assert {"model/first/kernel/value", "model/again/0/kernel/value"} <= paths
    assert not any("last" in path or "again/1" in path for path in paths)
    assert plan == run.plan(*nnx.eval_shape(lambda: make(Tied)), X, y=Y)
    assert "all_gather" in run.lower(*modules, X, y=Y).as_text()
    run(*modules, X, y=Y)
    (moment, *_) = (
        x.get_value()
        for path, x in nnx.iter_graph(modules[1])
        if path[-2:] == ("first", "kernel") and isinstance(x, nnx.Variable)
    )
    assert moment.sharding.is_fully_replicated


def test_a_step_that_only_evaluates() -> None:
    model, run = Small(nnx.Rngs(0)), sharded(evaluate)
    expected = nnx.jit(evaluate)(X, model, Y)
    for _ in range(2):
        np.testing.assert_allclose(run(X, model=model, y=Y), expected, 1e-5)
    assert "updates model in place" in repr(run)


def test_a_failing_call_leaves_the_modules_as_they_were() -> None:
    modules, run = make(Small), sharded(train)
    before = values(modules)
    with pytest.raises(shardfn.ShardingError, match="has 15 rows"):
        run(*modules, X[:15], y=Y[:15])
    for name, x in values(modules).items():
        np.testing.assert_array_equal(x, before[name])


SHARED = (
    r"'0/again/0' and '0/again/1' of the state are one variable or module of flax.nnx, "
    "and would come back as two: a pytree does not share its leaves.\n"
    r"  .* was called at test_nnx_modules.py:\d+ .*\n"
    r"Take nnx.state\(modules\) as the state"
)


@pytest.mark.parametrize(
    "call",
    [
        lambda run: run.init(lambda: make(Tied)[:2]),
        lambda run: run.shard(make(Tied)[:2]),
        lambda run: run(make(Tied)[:2], X),
    ],
    ids=["init", "shard", "call"],
)
def test_shared_variables_in_a_pytree_are_an_error(call) -> None:
    run = sharded(lambda state, x: (state, x.sum()))
    with pytest.raises(shardfn.ShardingError, match=SHARED):
        call(run)


def test_a_tied_model_is_made_in_shards_by_its_variables() -> None:
    run = sharded(train)
    graph = nnx.graphdef(nnx.eval_shape(lambda: make(Tied)))
    ours = nnx.merge(graph, run.init(lambda: nnx.state(make(Tied))))
    assert not ours[0].first.kernel.get_value().sharding.is_fully_replicated
    assert ours[0].last.kernel is ours[0].first.kernel
    assert_like(ours, make(Tied))


def test_a_module_inside_another_argument_is_refused() -> None:
    """What the step did to it was lost: Adam began anew in every step."""
    model = nnx.Linear(16, 24, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def step(model, others, x):
        grads = nnx.grad(lambda m: jnp.mean(m(x) ** 2))(model)
        others["optimizer"].update(model, grads)

    sharded = shardfn.fully_shard(step, MESH, min_size=0)
    with pytest.raises(shardfn.ShardingError, match="another argument holds 'Optim"):
        sharded(model, {"optimizer": optimizer}, jnp.ones((8, 16)))


@pytest.mark.parametrize("in_jit", [False, True])
def test_a_state_beside_a_module_is_a_pytree(in_jit: bool) -> None:
    """Lookahead's two sets of parameters, and the module that they are put into."""
    solver = optax.lookahead(optax.adam(1e-2), 2, 0.5)

    def step(params, model, solver_state, x, y):
        def loss(fast):
            new = nnx.merge(nnx.graphdef(model), fast)
            return jnp.mean((new(x) - y) ** 2)

        value, grads = jax.value_and_grad(loss)(params.fast)
        updates, solver_state = solver.update(grads, solver_state, params)
        return optax.apply_updates(params, updates), solver_state, value

    if in_jit:
        step = jax.jit(step)
    model = nnx.Linear(16, 24, rngs=nnx.Rngs(0))
    params = optax.LookaheadParams.init_synced(nnx.state(model, nnx.Param))
    rows = jax.random.normal(jax.random.key(0), (2, 8, 24))
    batch = rows[0, :, :16], rows[1]
    plain = ours = params, solver.init(params)
    sharded = shardfn.fully_shard(step, MESH, min_size=0, donate=False)
    for _ in range(3):
        *plain, expected = jax.jit(step)(plain[0], model, plain[1], *batch)
        *ours, value = sharded(ours[0], model, ours[1], *batch)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
    chex.assert_trees_all_close(ours, plain, rtol=1e-5, atol=1e-6)
    (kernel,) = {x.sharding for x in jax.tree.leaves(ours[0]) if x.ndim == 2}
    assert not kernel.is_fully_replicated


def test_writing_into_a_state_beside_a_module_is_refused() -> None:
    def step(model, state, x):
        state["kernel"][...] += 1.0
        model.kernel[...] *= 2.0
        return jnp.sum(model(x) @ state["kernel"].get_value().T)

    model = nnx.Linear(16, 24, rngs=nnx.Rngs(0))
    sharded = shardfn.fully_shard(step, MESH, min_size=0)
    message = "writes into 'Param kernel', of an argument that is no module"
    with pytest.raises(shardfn.ShardingError, match=message):
        sharded(model, nnx.state(model), jnp.ones((8, 16)))


class Counted(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(6, 8, rngs=rngs)
        self.calls = 0


def in_place(net, x):
    net.calls += 1
    net.linear.kernel[...] *= 2
    return jnp.sum(net.linear(x))


def returned(net, x):
    net.calls += 1
    return net, jnp.sum(net.linear(x))


def named(net, x):
    net.kind = "trained"
    net.linear.kernel[...] *= 2
    return jnp.sum(net.linear(x))


@pytest.mark.parametrize(
    "step, change",
    [
        (in_place, "calls of Variables from 0 to 1."),
        (returned, "calls of Counted from 0 to 1."),
        (named, "kind of Variables from None to Static(value='trained')."),
    ],
)
def test_static_data_that_changes_is_named(step, change: str) -> None:
    """The message named no leaf, and spoke of other containers."""
    with pytest.raises(shardfn.ShardingError) as error:
        shardfn.fully_shard(step, MESH)(Counted(nnx.Rngs(0)), X)
    lines = str(error.value).splitlines()
    assert lines[0] == f"{step.__name__} changes static data of its state: {change}"
    assert lines[2].startswith("It is no array, and what is compiled has the old one.")


def test_a_local_step_returns_its_modules() -> None:
    """Within shard_map, what is updated in place is a copy."""

    def kept(net, x):
        net.linear.kernel[...] *= 2
        return net, lax.pmean(jnp.sum(net.linear(x)), "data")

    def lost(net, x):
        return kept(net, x)[1]

    def on_shards(local):
        def run(net, x):
            return local(local.shard(net), x)[1]

        specs = jax.P(), jax.P("data")
        return jax.shard_map(
            run, mesh=MESH, in_specs=specs, out_specs=jax.P(), check_vma=False
        )

    net = Counted(nnx.Rngs(0))
    expected = jnp.sum(X @ (net.linear.kernel[...] * 2) + net.linear.bias[...]) / 2
    local = shardfn.fully_shard(kept, axis="data", min_size=0)
    np.testing.assert_allclose(on_shards(local)(net, X), expected, rtol=1e-5)
    with pytest.raises(shardfn.ShardingError) as error:
        on_shards(shardfn.fully_shard(lost, axis="data", min_size=0))(net, X)
    assert "Within shard_map or pmap they are copies: return the" in str(error.value)


def configured(model, x, config, *, noise=None):
    if noise is not None:
        x = x + jax.random.normal(noise, x.shape)
    kernel = model.first.kernel
    kernel[...] = kernel[...] * config.scale
    return {"loss": jnp.mean(config.act(model(x))), "act": config.act}


@dataclasses.dataclass(frozen=True)
class Config:
    act: Any
    scale: float


def test_configurations_beside_modules() -> None:
    """Those were errors: of a leaf that is no array."""
    run, scale = sharded(configured), 1.0
    ours, plain = Small(nnx.Rngs(0)), Small(nnx.Rngs(0))
    for config in (Config(jnp.tanh, 0.5), Config(jnp.sin, 2.0)) * 2:
        got = run(ours, X, config=config, noise=jax.random.key(3))
        expected = configured(plain, X, config, noise=jax.random.key(3))
        np.testing.assert_allclose(got["loss"], expected["loss"], 1e-5)
        assert got["act"] is config.act
        scale *= config.scale
    assert scale == 1.0
    assert_like(ours, plain)
    plan = run.plan(ours, X, config=config, noise=jax.random.key(3))
    assert any(c.path == "model/first/kernel/value" for c in plan.collectives)
    assert "updates model in place" in repr(run)
