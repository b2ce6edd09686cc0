"""In: steps that a transform gets right, and a plan spoiled on purpose. Out:
`assert_parity` passes the first, and says what differs in the others.
"""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.tree_util import DictKey
from sharded_and_plain import make_mesh

import shardfn
from shardfn.testing import assert_parity, assert_same
from shardfn.testing._next_arguments import NextArguments
from shardfn.testing._rounding_noise import rounded_otherwise

X = np.random.default_rng(0).standard_normal((16, 7), dtype=np.float32)


def make_state() -> dict[str, jax.Array]:
    w = jax.random.normal(jax.random.key(0), (7, 24))
    return {"w": w, "b": jnp.zeros(24), "count": jnp.int32(0)}


def train_step(state, x):
    def loss_fn(p):
        return jnp.square(x @ p["w"] + p["b"] - 1).mean()

    loss, grads = jax.value_and_grad(loss_fn)({k: state[k] for k in "wb"})
    new = {k: state[k] - 0.1 * grads[k] for k in "wb"}
    return new | {"count": state["count"] + 1}, {"loss": loss}


@pytest.mark.parametrize("mesh", ["1", "8", "2x4-auto"])
def test_a_sound_step_passes(mesh: str) -> None:
    mesh = make_mesh(mesh)
    axis = mesh.axis_names if len(mesh.axis_names) > 1 else "data"
    state = make_state()
    assert_parity(train_step, mesh, state, X, axis=axis)
    assert not any(x.is_deleted() for x in state.values())


def test_more_arguments_and_options() -> None:
    def scaled(state, x, scale):
        state, metrics = train_step(state, x * scale["by"])
        return state, metrics, x.sum(-1)

    scale = {"by": jnp.float32(0.5), "table": jnp.ones(3)}
    spec = (None, {"table": P()})
    assert_parity(scaled, make_mesh("8"), make_state(), X, scale, batch_spec=spec)


@pytest.fixture
def wrong_sums(monkeypatch) -> None:
    """Every reduce-scatter forgets to add: each device keeps its own term."""
    real = jax.lax.psum_scatter
    monkeypatch.setattr(
        jax.lax, "psum_scatter", lambda x, *args, **kw: real(x, *args, **kw) * 0.5
    )


def normalized(direction: Callable[[jax.Array], jax.Array]) -> Callable[..., Any]:
    """A step of a model whose norm does not see the bias in front of it."""

    def step(state, x):
        def loss_fn(p):
            y = x @ p["w"] + p["bias"]
            y = (y - y.mean(0)) / jnp.sqrt(y.var(0) + 1e-5) * p["scale"]
            return jnp.square(y - jnp.roll(y, 1, 0) - 1).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state)
        return {k: state[k] - 0.01 * direction(grads[k]) for k in state}, loss

    return step


def normalized_state() -> dict[str, jax.Array]:
    return {
        "bias": jax.random.normal(jax.random.key(1), (24,)) / 100,
        "scale": jnp.ones(24),
        "w": jax.random.normal(jax.random.key(0), (7, 24)),
    }


def adam(grad: jax.Array) -> jax.Array:
    return grad / (jnp.abs(grad) + 1e-12)


@pytest.mark.parametrize("rule", [jnp.sign, adam], ids=["lion", "adam"])
def test_rounding_may_decide_a_leaf(rule, monkeypatch) -> None:
    arguments = normalized(rule), make_mesh("8"), normalized_state(), X
    with pytest.warns(UserWarning) as caught:
        assert_parity(*arguments)
    lines = str(caught[0].message).splitlines()
    assert lines[0].startswith(
        "step over {'data': 8}: not compared, as rounding the arguments otherwise "
        "moves them on one device: bias (by "
    )
    assert lines[0].endswith("). All other leaves agree.")
    assert lines[1].startswith("  assert_parity was called at test_assert_parity.py:")
    assert lines[2].endswith("or give patterns of these leaves as ignore.")
    assert caught[0].filename == __file__
    assert_parity(*arguments, ignore=["^bias$"])
    monkeypatch.setattr("shardfn.testing._rounding_noise.ROUNDING_TRIALS", 0)
    with pytest.raises(AssertionError, match="leaf bias "):
        assert_parity(*arguments)


def in_dtype(dtype: str, direction: Any = adam) -> Callable[..., Any]:
    """A step that keeps its state in float32, and a bias in front of a norm in it,
    and computes in another dtype."""

    def step(state, x, shift):
        def loss_fn(p):
            p, low = jax.tree.map(lambda a: a.astype(dtype), (p, x))
            y = (low @ p["w"] + p["bias"]).astype(jnp.float32)
            y = y + shift.astype(jnp.float32)[:, None]
            y = (y - y.mean(0)) / jnp.sqrt(y.var(0) + 1e-3) * p["scale"].astype(y.dtype)
            return jnp.square(y - jnp.roll(y, 1, 0) - 1).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state)
        return {k: state[k] - 0.01 * direction(grads[k]) for k in state}, loss

    return step


SHIFT = np.arange(16, dtype=np.int32) % 3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_is_measured_where_the_step_rounds(dtype: str, monkeypatch) -> None:
    arguments = in_dtype(dtype), make_mesh("8"), normalized_state(), X, SHIFT
    with pytest.warns(UserWarning, match=r"on one device: bias \(by "):
        assert_parity(*arguments, steps=1)
    as_it_is = "shardfn.testing._rounding_noise.casting_otherwise"
    monkeypatch.setattr(as_it_is, lambda step, _: step)
    with pytest.raises(
        AssertionError, match="this is no noise of theirs|rounding noise in part"
    ):
        assert_parity(*arguments, steps=1)


@pytest.mark.parametrize(
    "dtype, factor", [("float32", 1.01), ("bfloat16", 0.0), ("float16", 0.5)]
)
def test_a_wrong_gradient_is_no_rounding(
    dtype: str, factor: float, monkeypatch
) -> None:
    real = jax.lax.psum_scatter
    monkeypatch.setattr(
        jax.lax, "psum_scatter", lambda x, *args, **kw: real(x, *args, **kw) * factor
    )
    step = in_dtype(dtype, direction=lambda grad: 10 * grad)
    with pytest.raises(AssertionError, match="leaf (scale|w) .*error"):
        assert_parity(step, make_mesh("8"), normalized_state(), X, SHIFT, steps=1)


def test_noise_beside_it_hides_no_mistake(wrong_sums) -> None:
    step = normalized(lambda grad: grad)
    with pytest.raises(AssertionError) as error:
        assert_parity(step, make_mesh("8"), normalized_state(), X)
    message = str(error.value)
    assert "leaf scale " in message and "also: w" in message
    assert message.endswith("in another order is gone, too.")


def test_a_leaf_that_is_noise_in_part_says_so(wrong_sums) -> None:
    def step(state, x):
        grad = jax.grad(lambda w: (x @ w).sum())(state["w"])
        return {"w": state["w"] - 1 - 1e-4 * grad}, ()

    state = {"w": 1 + 1e-4 * jax.random.normal(jax.random.key(0), (7, 24))}
    with pytest.raises(AssertionError) as error:
        assert_parity(step, make_mesh("8"), state, X, steps=1)
    assert "it is rounding noise in part. A model that" in str(error.value)
    assert str(error.value).endswith("ignore=['w'] does not compare the leaf.")


@pytest.mark.parametrize("by", [0.09, 0.26])
def test_no_leaf_of_zeros_goes_unseen(by: float, monkeypatch) -> None:
    """It fails, or rounding decides it and a warning names it."""

    def zeroed(self, state):
        return (whole := unshard(self, state)) | {"b": jnp.zeros_like(whole["b"])}

    unshard = shardfn.ShardedStep.unshard
    monkeypatch.setattr(shardfn.ShardedStep, "unshard", zeroed)
    monkeypatch.setattr(
        "shardfn.testing.parity.noise", lambda *args: {"b": by, "w": 0.0, "loss": 0.0}
    )
    failed = pytest.raises(AssertionError, match=r"leaf b .*error 1\.00e\+00 > 4e-01")
    listed = pytest.warns(UserWarning, match=r"on one device: b \(by 3e-01\)\. All")
    with failed if by < 0.1 else listed:
        assert_parity(train_step, make_mesh("8"), make_state(), X, steps=1)


def test_a_step_that_rounding_decides_proves_nothing(wrong_sums) -> None:
    def step(state, x):
        grad = jax.grad(lambda w: (x @ w).sum())(state["w"])
        return {"w": jnp.sin(state["w"] * 1e9) + grad}, ()

    with pytest.raises(AssertionError, match="such a step proves nothing. Take anoth"):
        assert_parity(step, make_mesh("8"), {"w": make_state()["w"]}, X)


def test_whole_numbers_are_not_rounded_otherwise() -> None:
    tree = {
        "mask": jnp.array([0.0, 1.0, 2.0]),
        "w": jnp.full(300, 0.3),
        "low": jnp.full(300, 0.3, jnp.bfloat16),
        "n": jnp.arange(3),
        "rate": jnp.float32(0.3),
    }
    got = rounded_otherwise(tree, np.random.default_rng(0))
    chex.assert_trees_all_equal_shapes_and_dtypes(got, tree)
    for name in ("mask", "n", "rate"):
        np.testing.assert_array_equal(got[name], tree[name])
    for name in ("w", "low"):
        assert len(np.unique(np.asarray(got[name], np.float32))) == 3
        off = np.asarray(got[name], np.float64) / np.asarray(tree[name], np.float64)
        assert abs(off - 1).max() <= 2 * jnp.finfo(got[name].dtype).eps


@pytest.mark.parametrize(
    "name, meant",
    [("tolerance", "tol"), ("step", "steps"), ("min_sze", "min_size"), ("zzz", None)],
)
def test_a_keyword_that_is_none(name: str, meant: str | None) -> None:
    with pytest.raises(TypeError) as error:
        assert_parity(train_step, make_mesh("8"), make_state(), X, **{name: 1})
    lines = str(error.value).splitlines()
    assert lines[0] == f"assert_parity has no argument '{name}'."
    assert lines[1].startswith("  assert_parity was called at test_assert_parity.py:")
    advice = "It takes steps, tol, ignore and the options of fully_shard."
    assert lines[2] == (f"Did you mean {meant}? " if meant else "") + advice


def test_the_first_difference_is_described(wrong_sums) -> None:
    with pytest.raises(AssertionError) as error:
        assert_parity(train_step, make_mesh("8"), make_state(), X)
    lines = str(error.value).splitlines()
    assert lines[0].startswith(
        "train_step over {'data': 8}, step 1, state, leaf b (float32 24): relative "
        "error 5.00e-01 > 1e-05, 24 of 24 values off, worst ["
    )
    assert lines[0].endswith(" stored data:0")
    assert lines[1] == "  2 of 3 leaves differ, also: w"
    assert lines[2].startswith("  rounding the arguments otherwise moves it by ")
    assert lines[2].endswith("in another order is gone, too.")


def test_ignored_leaves_are_not_compared(wrong_sums) -> None:
    assert_parity(
        train_step, make_mesh("8"), make_state(), X, ignore=["^b$", "^w$"], steps=1
    )


def test_a_model_that_is_not_split_proves_nothing() -> None:
    with pytest.raises(AssertionError, match="every leaf of the state is whole on eve"):
        assert_parity(train_step, make_mesh("8"), make_state(), X, min_size=10**6)


DIFFERENT = [
    ({"a": 1.0}, {"b": 1.0}, "other pytree structure"),
    (np.zeros(3), np.zeros(4), "leaf itself plain is float32 3, sharded is float32 4"),
    (np.float32(1), np.int32(1), "plain is float32 scalar, sharded is int32 scalar"),
    (jnp.asarray(1.0), jnp.float32(1), "float32 scalar weak, sharded is float32 scal"),
    (np.arange(4), np.array([0, 1, 2, 4]), r"1 of 4 values differ, first \[3\]: plai"),
    (np.ones(2), np.array([1, np.nan]), r"not finite in 1 other places, first \[1\]"),
    ([1.0, np.ones(9)], [1.0, np.ones(9) * 2], r"leaf 1 .* 9 of 9 values off"),
    (np.array(1 + 1j), np.array(1 + 2j), r"relative error 7.07e-01"),
    (jax.random.key(0), jax.random.key(1), r"key<fry> scalar\): 1 of 2 values differ"),
]


@pytest.mark.parametrize("plain, sharded, message", DIFFERENT)
def test_differences(plain, sharded, message: str) -> None:
    assert_same(plain, plain, "here")
    with pytest.raises(AssertionError, match=message) as error:
        assert_same(plain, sharded, "here")
    assert str(error.value).startswith("here")


def test_not_a_number_equals_itself() -> None:
    x = np.array([np.nan, np.inf, -np.inf, 1])
    assert_same(x, x.copy(), "here", tol=0.0)
    with pytest.raises(AssertionError, match=r"not finite|relative error"):
        assert_same(x, -x, "here")


def with_momentum(params, momentum, x):
    """The second step moves by what the first one left behind."""
    loss, grad = jax.value_and_grad(lambda w: jnp.square(x @ w - 1).mean())(params)
    momentum = {"m": 0.9 * momentum["m"] + grad, "count": momentum["count"] + 1}
    return params - 0.1 * momentum["m"], momentum, loss


@pytest.mark.parametrize("form", ["state first", "loss first"])
def test_all_that_comes_back_goes_on(form: str, monkeypatch) -> None:
    """Only the first argument did: the others began anew in every step."""
    steps = {
        "state first": with_momentum,
        "loss first": lambda p, m, x: with_momentum(p, m, x)[::-1],
    }
    w, moments = jnp.ones((7, 24)), {"m": jnp.zeros((7, 24)), "count": jnp.int32(0)}
    seen, after = [], NextArguments.after

    def watched(self, args, out):
        leaves = jax.tree.leaves_with_path(out)
        seen.extend(int(x) for path, x in leaves if DictKey("count") in path)
        return after(self, args, out)

    monkeypatch.setattr(NextArguments, "after", watched)
    assert_parity(steps[form], make_mesh("8"), w, moments, X, steps=3)
    assert seen == [1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    "returned",
    [
        jnp.mean,
        lambda y: {"loss": jnp.mean(y)},
        lambda y: (jnp.mean(y), jnp.max(y)),
        lambda y: y,
    ],
)
@pytest.mark.parametrize("options", [{}, {"min_size": 8, "stationary": False}])
def test_a_function_that_returns_no_state_is_compared(returned, options) -> None:
    """An evaluation, or what decodes."""
    p, x = {"w": jnp.arange(256.0).reshape(16, 16) / 256}, jnp.ones((8, 16))
    assert_parity(lambda p, x: returned(x @ p["w"]), make_mesh("8"), p, x, **options)
    spoiled = jax.tree.map(lambda w: w + 1, p)
    calls = []

    def changes(p, x):
        calls.append(None)
        return returned(x @ (p if len(calls) == 1 else spoiled)["w"])

    with pytest.raises(AssertionError, match="results"):
        assert_parity(changes, make_mesh("8"), p, x, **options)


def test_a_step_whose_caches_alone_come_back_goes_on(monkeypatch) -> None:
    """Generation: the parameters are read only, and no state comes back."""

    def decode(params, cache, x):
        past = jnp.sum(cache["k"], axis=1)
        row = (x @ params["w"] + past + 1)[:, None]
        new = {"k": lax.dynamic_update_slice_in_dim(cache["k"], row, 1, 1)}
        return jnp.sum(new["k"], axis=(1, 2)), new

    seen, after = [], NextArguments.after

    def watched(self, args, out):
        seen.append(float(out[1]["k"][0, 1, 0]))
        return after(self, args, out)

    monkeypatch.setattr(NextArguments, "after", watched)
    params, cache = {"w": jnp.zeros((7, 3))}, {"k": jnp.zeros((16, 4, 3))}
    assert_parity(decode, make_mesh("8"), params, cache, X, steps=3)
    assert seen == [1, 1, 2, 2, 3, 3]


@chex.dataclass(frozen=True)
class ChexState:
    w: chex.Array
    count: chex.Array


def test_states_and_assertions_of_chex() -> None:
    """A step that chex counts the traces of, and that asserts what it knows of shapes:
    those of the whole batch."""

    @chex.assert_max_traces(n=2)
    def step(state: ChexState, x: jax.Array) -> tuple[ChexState, jax.Array]:
        chex.assert_shape([x, state.w], [(16, 7), (7, 24)])
        loss, grad = jax.value_and_grad(lambda w: jnp.square(x @ w).mean())(state.w)
        return state.replace(w=state.w - 0.1 * grad, count=state.count + 1), loss

    state = ChexState(w=make_state()["w"], count=jnp.int32(0))
    assert_parity(step, make_mesh("8"), state, X)
    sharded = shardfn.fully_shard(step, make_mesh("8"), min_size=0)
    chex.clear_trace_counter()
    stored = sharded.shard(state)
    for _ in range(3):
        stored, _ = sharded(stored, X)
    chex.assert_trees_all_equal_shapes_and_dtypes(stored, state)
    chex.assert_tree_all_finite(stored)
    assert "w" in str(sharded.plan(stored, X)) and int(stored.count) == 3
