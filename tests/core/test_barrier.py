"""In: steps on a mesh of two axes whose plans or whose users tie values together, and
one with a softmax for TPUs. Out: the plain step's numbers: a tied value that is
replicated over an axis is still known to be, so that results made of it can be
returned; and less memory where XLA would fuse what it should not.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from sharded_and_plain import make_mesh

from shardfn import fully_shard
from shardfn._core.barrier import undelayed_on_gpus, unfused_on_tpus
from shardfn._lowering import operations
from shardfn.analysis import targets
from shardfn.testing import assert_parity

X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)


def users(state, x):
    """A replicated value and rows of the batch, tied by the user."""
    w, x = lax.optimization_barrier((state["w"] * 2.0, x))
    return {**state, "w": w / 4.0}, (x @ w).sum()


def again(state, x):
    """`w` is gathered for the rows, and again, behind them, for a product of its own
    that the new state is made of."""
    h = jnp.tanh(x @ state["w"]) @ state["head"]
    power = state["w"] @ state["w"]
    return {**state, "w": state["w"] - 0.1 * power}, (h**2).mean()


def layers(state, x):
    def loss(state):
        h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, state["layers"])
        return (h**2).mean()

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value


@pytest.mark.parametrize(
    "step, options", [(users, {}), (again, {}), (layers, {"prefetch": 1})]
)
def test_what_is_tied_stays_replicated(step, options) -> None:
    shapes = {"w": (8, 8), "head": (8, 64), "layers": (3, 8, 8)}
    rng = np.random.default_rng(1)
    state = {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}
    axes = ("replica", "data")
    assert_parity(step, make_mesh("2x4"), state, X, axis=axes, min_size=8, **options)


def attention(w, x):
    q = jnp.einsum("btd,dhk->bthk", x, w.astype(x.dtype))
    scores = jnp.einsum("bthk,bshk->bhts", q, 2 * q).astype(jnp.float32) / 8
    weights = jax.nn.softmax(scores, -1).astype(x.dtype)
    return w, jnp.einsum("bhts,bshk->bthk", weights, q + 1)


LARGE = (
    jax.ShapeDtypeStruct((512, 8, 128), jnp.float32),
    jax.ShapeDtypeStruct((4, 2048, 512), jnp.bfloat16),
)


@pytest.mark.aot("tpu:v5p:2x2x1")
def test_tpus_write_no_scores_in_float32_for_a_softmax(monkeypatch) -> None:
    """Without this XLA fuses the maximum with the difference, and takes 132 MiB."""
    temporary = {}
    for fuses in (False, True):
        if fuses:
            monkeypatch.setattr(operations, "unfused_on_tpus", lambda x: x)
        lowered = fully_shard(attention, targets.mesh("tpu:v5p:2x2x1")).lower(*LARGE)
        assert lowered.as_text().count("optimization_barrier") == (not fuses)
        analysis = lowered.compile().memory_analysis()
        assert analysis is not None
        temporary[fuses] = analysis.temp_size_in_bytes
    scores = 8 * 2048 * 2048
    assert temporary[True] > 4 * scores - 2**20
    assert temporary[False] < 2.5 * scores


@pytest.mark.aot("h100:4")
def test_gpus_fuse_a_softmax_as_they_do() -> None:
    lowered = fully_shard(attention, targets.mesh("h100:4")).lower(*LARGE)
    assert "optimization_barrier" not in lowered.as_text()


@pytest.mark.parametrize("tied", [unfused_on_tpus, undelayed_on_gpus])
def test_what_is_tied_has_the_derivatives_and_batches_of_its_operand(tied) -> None:
    x = jnp.arange(6.0).reshape(2, 3)

    def square(x):
        return (tied(x) ** 2).sum()

    np.testing.assert_array_equal(jax.grad(square)(x), 2 * x)
    np.testing.assert_array_equal(jax.vmap(square)(x), (x**2).sum(1))
    np.testing.assert_array_equal(tied(x), x)
