"""In: steps that a transform gets right, and a plan spoiled on purpose. Out:
`assert_parity` passes the first, and says what differs in the others.
"""

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from jax.sharding import PartitionSpec as P
from parity import make_mesh
from parity import quick_compiles as quick_compiles

from shardfn.testing import assert_parity, assert_same

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


@pytest.mark.standard_promotion
def test_noise_decides_some_leaves() -> None:
    """The program's own list of such leaves is needed, and enough."""
    program = programs.get("gpt_key_bias")
    state = jax.jit(program.init)(jax.random.key(0))
    arguments = program.step, make_mesh("8"), state, program.batch(0)
    with pytest.raises(AssertionError, match="key/bias"):
        assert_parity(*arguments, tol=program.tol)
    ignore = [n.pattern for n in program.noisy]
    assert_parity(*arguments, tol=program.tol, ignore=ignore)


@pytest.fixture
def wrong_sums(monkeypatch) -> None:
    """Every reduce-scatter forgets to add: each device keeps its own term."""
    real = jax.lax.psum_scatter
    monkeypatch.setattr(
        jax.lax, "psum_scatter", lambda x, *args, **kw: real(x, *args, **kw) * 0.5
    )


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
