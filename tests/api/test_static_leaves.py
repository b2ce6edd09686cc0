"""In: steps on Equinox modules and on other pytrees with leaves that are no arrays, as
under `eqx.filter_jit`. Out: what the plain step gives, with these leaves where they
were; or an error that names one.
"""

import dataclasses
import enum
import warnings
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import shardfn
from shardfn._core.static_leaves import Static, close_static, has_static, open_static
from shardfn.storage.checkpoint import Checkpoints
from shardfn.storage.safetensors import load_safetensors, write_safetensors
from shardfn.testing import assert_parity

MESH = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
X = jnp.arange(96.0).reshape(16, 6) % 5 / 5
Y = jnp.arange(16) % 3
ADAM = optax.adam(1e-2)

pytestmark = pytest.mark.standard_promotion


class Net(eqx.Module):
    """Functions, numbers and names among its leaves; 13 and 9 are stored padded."""

    first: eqx.nn.MLP
    drop: eqx.nn.Dropout
    norm: eqx.nn.LayerNorm
    last: eqx.nn.Linear
    shared: eqx.nn.Linear
    act: Any
    scale: float
    kind: str

    def __init__(self, key) -> None:
        a, b, c = jax.random.split(key, 3)
        self.first = eqx.nn.MLP(6, 13, 13, depth=1, activation=jax.nn.gelu, key=a)
        self.drop = eqx.nn.Dropout(0.25)
        self.norm = eqx.nn.LayerNorm(13)
        self.last = eqx.nn.Linear(13, 9, key=b)
        self.shared = eqx.nn.Linear(9, 9, key=c)
        self.act, self.scale, self.kind = (lambda x: x * jnp.tanh(x)), 0.5, "twice"

    def __call__(self, x, key):
        x = self.drop(self.norm(self.first(x)), key=key)
        for _ in range({"twice": 2}[self.kind]):
            x = x * self.scale if self.scale else x
        return self.act(self.shared(self.last(x)))


def loss_fn(model, x, y, key):
    logits = jax.vmap(model)(x, jax.random.split(key, len(x)))
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def train(model, opt_state, x, y, *, dropout_rng):
    loss, grads = eqx.filter_value_and_grad(loss_fn)(model, x, y, dropout_rng)
    params = eqx.filter(model, eqx.is_array)
    updates, opt_state = ADAM.update(grads, opt_state, params)
    return eqx.apply_updates(model, updates), opt_state, loss


def make(key):
    model = Net(key)
    return model, ADAM.init(eqx.filter(model, eqx.is_array))


def sharded(step=train, **options) -> shardfn.ShardedStep:
    return shardfn.fully_shard(step, MESH, min_size=8, **options)


def arrays(tree) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(eqx.filter(tree, eqx.is_array))]


def assert_like(got, expected) -> None:
    for x, y in zip(arrays(got), arrays(expected), strict=True):
        np.testing.assert_allclose(x, y, 1e-5, 1e-6)


def test_equinox_modules_are_trained_as_under_filter_jit(tmp_path) -> None:
    run = sharded()
    state = run.init(make, jax.random.key(0))
    model = state[0]
    assert (model.kind, model.scale, model.drop.inference) == ("twice", 0.5, False)
    assert model.first.activation is jax.nn.gelu
    (half,) = {x.data.size for x in model.first.layers[0].weight.addressable_shards}
    assert half == 39
    expected = plain = eqx.combine(run.unshard(state), make(jax.random.key(0)))
    jitted, acts = eqx.filter_jit(train), (plain[0].act, model.act)
    for i in range(3):
        key = jax.random.key(i)
        *expected, loss = jitted(*expected, X, Y, dropout_rng=key)
        *state, got = run(*state, X, Y, dropout_rng=key)
        np.testing.assert_allclose(got, loss, 1e-5)
    assert_like(run.unshard(state), expected)
    assert state[0].act is acts[1] and state[0].kind == "twice"
    assert "argument 1 ('opt_state'), result 1" in repr(run)
    with Checkpoints(tmp_path / "all", run) as checkpoints:
        checkpoints.save(3, tuple(state))
        again = checkpoints.restore(run.abstract(make, jax.random.key(0)))
    assert_like(run.unshard(again), expected)
    assert again[0].first.activation is jax.nn.gelu
    *again, _ = run(*again, X, Y, dropout_rng=key)
    write_safetensors(tmp_path / "model", again[0], run)
    model = load_safetensors(tmp_path / "model", Net(jax.random.key(5)), run)
    assert_like(model, run.unshard(again[0]))


def test_plans_programs_and_splits_are_those_of_the_arrays() -> None:
    run, state = shardfn.fully_shard(train, MESH, min_size=0), make(jax.random.key(0))
    call = (*state, X, Y), {"dropout_rng": jax.random.key(0)}
    plan = run.plan(*call[0], **call[1])
    assert any(c.path == "model/last/weight" for c in plan.collectives)
    like = run.abstract(make, jax.random.key(0))
    assert like[0].kind == "twice" and like[0].last.weight.shape == (9, 13)
    assert "all-gather" in run.lower(*call[0], **call[1]).compile().as_text()
    split = run.shardings(state)
    assert split[0].first.activation is jax.nn.gelu
    assert split[0].first.layers[0].weight.spec == jax.P(None, "data")
    whole = run.unshard(run.shard(state))
    assert_like(whole, state)
    assert whole[0].act is state[0].act


def test_parity_is_asserted_of_modules() -> None:
    def step(model, opt_state, x, y, factor, seed_of):
        key = seed_of(1)
        return train(model, opt_state, factor * x, y, dropout_rng=key)

    model, opt_state = make(jax.random.key(0))
    others = 0.5, jax.random.key  # a number is an array; a function is static
    assert_parity(step, MESH, model, opt_state, X, Y, *others, steps=3)


class WithState(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self, key) -> None:
        self.first = eqx.nn.Linear(6, 13, key=key)
        self.norm = eqx.nn.BatchNorm(13, "row", mode="batch")

    def __call__(self, x, state):
        return self.norm(jnp.tanh(self.first(x)), state)


def test_layers_with_state() -> None:
    def step(model, state, x):
        @eqx.filter_value_and_grad(has_aux=True)
        def loss(model, state):
            axes = (0, None)
            rows = jax.vmap(model, axis_name="row", in_axes=axes, out_axes=axes)
            out, state = rows(x, state)
            return jnp.mean((out - 1) ** 2 * jnp.arange(13)), state

        (value, state), grads = loss(model, state)
        updates = jax.tree.map(lambda g: -0.1 * g, grads)
        return eqx.apply_updates(model, updates), state, value

    model, state = eqx.nn.make_with_state(WithState)(jax.random.key(0))
    assert_parity(step, MESH, model, state, X, steps=3)


@eqx.filter_value_and_grad
def mean_and_grads(model, x):
    return jnp.mean(jax.vmap(model)(x))


def test_modules_within_shard_map() -> None:
    def step(model, x):
        loss, grads = mean_and_grads(model, x)
        grads = jax.tree.map(lambda g: -lax.pmean(g, "data"), grads)
        return eqx.apply_updates(model, grads), lax.pmean(loss, "data")

    model = eqx.nn.MLP(6, 5, 13, depth=1, key=jax.random.key(0))
    local = shardfn.fully_shard(step, axis="data", min_size=8)

    def run(x):
        x = lax.dynamic_slice_in_dim(x, 8 * lax.axis_index("data"), 8)
        new, loss = local(local.shard(model), x)
        assert new.activation is model.activation
        return jax.tree.leaves(eqx.filter(local.unshard(new), eqx.is_array)), loss

    over = jax.shard_map(
        run, mesh=MESH, in_specs=jax.P(), out_specs=jax.P(), check_vma=False
    )
    got, loss = jax.jit(over)(X)
    value, grads = mean_and_grads(model, X)
    expected = eqx.apply_updates(model, jax.tree.map(jnp.negative, grads))
    np.testing.assert_allclose(loss, value, 1e-5)
    assert_like(got, jax.tree.leaves(eqx.filter(expected, eqx.is_array)))


# Other leaves


class Kind(enum.Enum):
    SUM = 1
    MEAN = 2


@dataclasses.dataclass(frozen=True)
class Config:
    kind: Kind
    scale: float


def configured(w, x, config, mode="train"):
    reduce = jnp.sum if config.kind is Kind.SUM else jnp.mean
    loss = reduce(x @ w) * config.scale
    return w - 0.1 * (mode == "train"), {"loss": loss, "mode": mode}


W = jnp.arange(60.0).reshape(6, 10)


def test_configurations_are_arguments() -> None:
    run = sharded(configured, batch_spec=jax.P("data"))
    for config in (
        Config(Kind.SUM, 1.0),
        Config(Kind.MEAN, 2.0),
        Config(Kind.SUM, 1.0),
    ):
        for mode in ("train", "evaluate"):
            w, out = run(run.shard(W), X, config=config, mode=mode)
            expected = configured(W, X, config, mode)
            np.testing.assert_allclose(w, expected[0], 1e-6)
            np.testing.assert_allclose(out["loss"], expected[1]["loss"], 1e-5)
            assert out["mode"] == mode


class Unhashable:
    def __eq__(self, other: object) -> bool:
        return True


class Changeable:
    rate = 0.1


@pytest.mark.parametrize(
    "leaf, says",
    [
        (Unhashable(), "is an Unhashable, not an array"),
        (Changeable(), "is a Changeable, not an array"),
        (iter(range(3)), "is a range_iterator, not an array"),
        (np.array(["a"]), "is an array of dtype <U1"),
    ],
    ids=["no hash", "by identity", "iterator", "texts"],
)
def test_leaves_that_may_change_unseen_are_refused(leaf, says) -> None:
    run = sharded(lambda w, x, config: (w, x.sum()))
    with pytest.raises(shardfn.ShardingError) as error:
        run(W, X, leaf)
    assert says in str(error.value)
    assert "a frozen dataclass" in str(error.value)
    with pytest.raises(shardfn.ShardingError, match="state leaf 'b' "):
        run.init(lambda: {"a": W, "b": leaf})


def test_a_state_whose_static_leaf_changes_is_refused() -> None:
    run = sharded(lambda state, x: ({**state, "name": "other"}, x.sum()))
    with pytest.raises(shardfn.ShardingError) as error:
        run({"w": W, "name": "first"}, X)
    message = "static data of its state: leaf 'name' from 'first' to 'other'."
    assert message in str(error.value)


def test_many_values_of_a_static_leaf_are_warned_of() -> None:
    run = sharded(lambda w, batch: (w + 1, batch["x"].sum()))
    w = run.shard(W)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(11):
            w, _ = run(w, {"x": X[:2], "text": ["same", f"row {i}"]})
    found = [x for x in caught if x.category is shardfn.StaticArgumentWarning]
    assert len(found) == 1
    says = "compiled for each value of argument leaf 'text/1', which is no array"
    assert says in str(found[0].message) and "'row 8'" in str(found[0].message)


@pytest.mark.parametrize("pair", [(1, True), (0.0, -0.0), ("a", "b"), (1, 1.0)])
def test_values_that_a_program_tells_apart_are_not_equal(pair) -> None:
    assert Static(pair[0]) != Static(pair[1])
    assert Static(pair[0]) == Static(pair[0])


def test_what_has_no_static_leaf_stays_the_same_object() -> None:
    tree = {"w": W, "n": 3, "none": None}
    assert close_static(tree) is tree and open_static(tree) is tree
    assert not has_static(tree)
    closed = close_static({"f": jnp.sin, **tree})
    assert len(jax.tree.leaves(closed)) == 2 and open_static(closed)["f"] is jnp.sin
    assert close_static(closed) is closed and not has_static(closed)


# Prefixes


class Named(NamedTuple):
    x: Any
    table: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Data:
    x: Any
    table: Any


@pytest.mark.parametrize("kind", [Named, Data, dict])
def test_a_prefix_may_be_a_dictionary_of_fields(kind) -> None:
    def step(w, batch, *, dropout_rng):
        batch = batch if kind is not dict else Data(**batch)
        noise = jax.random.normal(dropout_rng, (10,))
        return w + batch.table.sum(), (batch.x @ w * noise).sum()

    run = sharded(step, batch_spec={"table": jax.P()})
    batch = kind(x=X, table=jnp.arange(3.0))
    for _ in range(2):
        w, loss = run(W, batch, dropout_rng=jax.random.key(0))
        expected = step(W, batch, dropout_rng=jax.random.key(0))
        np.testing.assert_allclose(w, expected[0], 1e-5)
        np.testing.assert_allclose(loss, expected[1], 1e-5)
    wrong = sharded(step, batch_spec={"tables": jax.P()})
    with pytest.raises(shardfn.ShardingError, match=r"batch_spec names \['tables'\]"):
        wrong(W, batch, dropout_rng=jax.random.key(0))
