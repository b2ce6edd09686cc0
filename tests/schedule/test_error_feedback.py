"""In: steps whose quantized sums of gradients have residuals. Out: sums that add up to
the exact ones, over steps; residuals that are state like any other; errors where there
are no terms to add them to.
"""

import functools
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from layered import STATE, WIDTH, layered_loss
from plan_helpers import cpu_mesh

import shardfn
from shardfn import error_feedback, zero_residuals
from shardfn.storage.checkpoint import Checkpoints

SHAPES = {"a": (16, 36), "b": (36, 8)}
BLOCK = 4
FIXED = dict(min_size=8, stationary=False, quantize_block=BLOCK)


def mlp(params: Any, x: Any) -> Any:
    return ((jnp.tanh(x @ params["a"]) @ params["b"]) ** 2).mean()


def drawn(shapes: Any, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda s: jnp.asarray(rng.standard_normal(s) / 4, jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def summing(loss_fn: Any, microbatches: int = 1, rate: float = 0.0) -> Any:
    """A step on parameters and residuals that returns the sums of gradients, too."""

    def step(state, x):
        params, residuals = state

        def accumulate(grads, part):
            return jax.tree.map(jnp.add, grads, jax.grad(loss_fn)(params, part)), None

        if microbatches == 1:
            grads = jax.grad(loss_fn)(params, x)
        else:
            zeros = jax.tree.map(jnp.zeros_like, params)
            parts = x.reshape(microbatches, -1, x.shape[1])
            grads, _ = lax.scan(accumulate, zeros, parts)
        grads, residuals = error_feedback(grads, residuals)
        params = jax.tree.map(lambda w, g: w - rate * g, params, grads)
        return (params, residuals), grads

    return step


def names_of(params: Any, dtype: Any) -> dict[str, Any]:
    """Leaves that are small are named one by one."""
    flat, _ = jax.tree.flatten_with_path(params)
    paths = (jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in flat)
    return dict.fromkeys([f"0/{path}" for path in paths], dtype)


def fed(
    step: Any, params: Any, sizes: tuple[int, ...], dtype: Any = "int8", **options: Any
) -> tuple[Any, Any]:
    """The sharded step, and its state, with residuals over the first mesh axis."""
    mesh = cpu_mesh(*sizes)
    names, over = mesh.axis_names, mesh.axis_names[0]
    asked = dict(reduce_dtype=names_of(params, dtype and {over: dtype}), **FIXED)
    if len(names) == 1:
        asked["accumulate"] = "defer"
    axis = names if len(names) > 1 else names[0]
    sharded = shardfn.fully_shard(step, mesh, axis=axis, **(asked | options))
    state = params, zero_residuals(params, mesh, over, min_size=0)
    return sharded, sharded.shard(state)


def layered(kind: str) -> Any:
    def layer(h, w):
        return h + jnp.tanh(h @ w["up"]) @ w["down"]

    return layered_loss(kind, layer, lambda state, h: h @ state["head"])


CASES = {
    "shards": (mlp, SHAPES, 1, (2, 4)),
    "whole gradients": (mlp, SHAPES, 2, (4,)),
    "layers": (layered("scan_remat"), STATE, 1, (2, 2)),
    "layers of microbatches": (layered("scan"), STATE, 2, (2, 2)),
}
"""A loss, its parameters, microbatches and mesh."""


@functools.cache
def sums_of(name: str, steps: int, **options: Any) -> tuple[list[Any], list[Any]]:
    """The sums of each step of a case, whose parameters stay as they are, and what all
    sums until then lack."""
    loss_fn, shapes, microbatches, sizes = CASES[name]
    step = summing(loss_fn, microbatches)
    sharded, state = fed(step, drawn(shapes), sizes, **options)
    x, sums, lack = drawn((16, WIDTH), 1), [], []
    for _ in range(steps):
        state, grads = sharded(state, x)
        sums.append(list(map(np.asarray, jax.tree.leaves(grads))))
        lack.append([np.asarray(r).sum(axis=0) for r in jax.tree.leaves(state[1])])
    return sums, lack


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore::shardfn.ResidualWarning")
def test_sums_add_up_to_the_exact_ones(name: str) -> None:
    """All that rounding took, of terms and of sums that are gathered, is in the
    residuals, which do not grow. Where nothing is rounded they stay zero."""
    (exact,), (zeros,) = sums_of(name, 1, dtype=None)
    sums, lack = sums_of(name, 5)
    for i, expected in enumerate(exact):
        assert not zeros[i].any()
        total = sum(each[i] for each in sums) + lack[-1][i]
        np.testing.assert_allclose(total, 5 * expected, rtol=1e-5, atol=1e-5)
        largest = [np.abs(each[i]).max() for each in lack]
        assert 0 < max(largest) < 3 * largest[0]


def rounding(x: np.ndarray, terms: int) -> np.ndarray:
    """The most that int8 takes of sums of so many terms, as large as `x` at most: half
    a step of each scale, which is rounded to bfloat16."""
    return terms * np.abs(x).max() * (0.5 / 127) * (1 + 2**-8)


@pytest.mark.filterwarnings("ignore::shardfn.ResidualWarning")
def test_the_mean_of_sums_becomes_exact() -> None:
    """It is off by a residual, of two hosts' terms and of the sum, by their number."""
    (exact,), _ = sums_of("shards", 1, dtype=None)
    steps = 5
    sums, lack = sums_of("shards", steps)
    for i, expected in enumerate(exact):
        off = np.abs(np.mean([each[i] for each in sums], axis=0) - expected)
        largest = max(np.abs(each[i]).max() for each in sums)
        assert np.abs(lack[-1][i]).max() <= rounding(np.float32(1.5 * largest), 3)
        assert off.max() <= np.abs(lack[-1][i]).max() / steps + 1e-6
        assert off.max() < np.abs(sums[0][i] - expected).max() / 3


@pytest.mark.parametrize("asked", [
    dict(dtype="float8_e4m3fn"), dict(reduce_rounding="stochastic"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore::shardfn.ResidualWarning")
def test_other_roundings_leave_residuals(asked: dict[str, Any]) -> None:
    (exact,), _ = sums_of("shards", 1, dtype=None)
    sums, lack = sums_of("shards", 3, **asked)
    for i, expected in enumerate(exact):
        total = sum(each[i] for each in sums) + lack[-1][i]
        np.testing.assert_allclose(total, 3 * expected, rtol=1e-5, atol=1e-5)
        assert lack[-1][i].any()


def test_moves_are_those_without_feedback() -> None:
    """As many bytes; plans say what residuals take, and programs move as planned."""
    params, x = drawn(SHAPES), drawn((16, WIDTH), 1)
    sharded, state = fed(summing(mlp), params, (2, 4))
    plan = sharded.plan(state, x)
    alone, bare = fed(summing(mlp), params, (2, 4))
    bare = bare[0], jax.tree.map(lambda _: None, params)
    without = alone.plan(bare, x)
    sent = [(c.op, c.axis, c.dtype, c.wire_bytes) for c in plan.collectives]
    others = [(c.op, c.axis, c.dtype, c.wire_bytes) for c in without.collectives]
    assert sorted(sent) == sorted(others)
    assert sum(4 * a * b // 4 for a, b in SHAPES.values()) == 864
    line = "error feedback over replica: 864 B of residuals a device, of '0/a', '0/b'"
    assert line in str(plan)
    text = plan.explain("0/a")
    assert (
        "what quantizing takes from each term is added to it in the next step" in text
    )
    assert "a row of terms for each device that sums them" in plan.explain("1/a/terms")
    assert plan.verify(sharded.lower(state, x).compile()).ok
    assert state[1]["a"].terms.sharding.spec == jax.P("replica", None, "data")
    assert state[1]["a"].terms.addressable_shards[0].data.shape == (1, 16, 9)


def trained(shapes: Any = SHAPES, sizes: Any = (2, 4)) -> tuple[Any, Any, Any]:
    sharded, state = fed(summing(mlp, rate=0.1), drawn(shapes), sizes)
    x = drawn((16, WIDTH), 1)
    for _ in range(2):
        state, _ = sharded(state, x)
    return sharded, state, x


def test_residuals_are_saved_and_restored(tmp_path: Path) -> None:
    """Training goes on with the same bits. On a mesh of other sizes rows are added up;
    they begin with zeros where a checkpoint has none."""
    sharded, state, x = trained()
    with Checkpoints(tmp_path, sharded) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.save(2, (state[0], None))
        again = checkpoints.restore(state, 1)
        other, fewer = fed(summing(mlp, rate=0.1), drawn(SHAPES), (1, 4))
        more_step, more = fed(summing(mlp, rate=0.1), drawn(SHAPES), (4, 2))
        with pytest.warns(shardfn.ResidualWarning) as caught:
            zeros = checkpoints.restore(state, 2)
    assert str(caught[0].message).startswith(
        "checkpoint 2 has no residuals '1/a/terms', '1/b/terms': they begin with zeros."
    )
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(zeros[1]))
    jax.tree.map(np.testing.assert_array_equal, zeros[0], state[0])
    rows = [np.asarray(r) for r in jax.tree.leaves(state[1])]
    alone = shardfn.fully_shard(summing(mlp, rate=0.1), cpu_mesh(4), **FIXED)
    jax.block_until_ready(alone(alone.shard(state), x))  # no axis to feed back over
    for step, like in ((other, fewer), (more_step, more), (None, fewer)):
        with Checkpoints(tmp_path, step) as checkpoints:
            found = checkpoints.restore(like, 1)
        jax.tree.map(np.testing.assert_array_equal, found[0], state[0])
        for now, before in zip(jax.tree.leaves(found[1]), rows, strict=True):
            np.testing.assert_allclose(
                np.asarray(now).sum(axis=0), before.sum(axis=0), atol=1e-7
            )
    whole = sharded.shard(sharded.unshard(state))
    runs = [sharded(each, x) for each in (state, again, whole)]
    for run in runs[1:]:
        jax.tree.map(np.testing.assert_array_equal, run, runs[0])


@pytest.mark.standard_promotion
def test_an_optimizer_has_residuals_in_its_state() -> None:
    """As a transformation in front of others, which one device does not see."""
    mesh = cpu_mesh(2, 4)
    feedback = optax.GradientTransformation(
        lambda params: zero_residuals(params, mesh, "replica", min_size=0),
        lambda grads, state, params=None: error_feedback(grads, state),
    )
    tx = optax.chain(feedback, optax.clip_by_global_norm(0.1), optax.adam(1e-2))

    def create():
        params = drawn(SHAPES) | {"bias": jnp.zeros(8, jnp.bfloat16)}
        return params, tx.init(params)

    def step(state, x):
        params, moments = state
        loss_fn = lambda p: mlp(p, x) + jnp.square(x.mean() - p["bias"]).sum()  # noqa: E731
        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    asked = names_of(drawn(SHAPES), {"replica": "int8"})
    sharded = shardfn.fully_shard(
        step, mesh, axis=("replica", "data"), reduce_dtype=asked, **FIXED
    )
    x, plain = drawn((16, WIDTH), 1), jax.jit(create)()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", shardfn.ResidualWarning)  # of the bias
        state = sharded.init(create)
        for _ in range(3):
            (state, loss), (plain, expected) = (
                sharded(state, x),
                jax.jit(step)(plain, x),
            )
            np.testing.assert_allclose(loss, expected, rtol=2e-3)
    assert state[0]["bias"].dtype == jnp.bfloat16
    assert all(np.asarray(state[1][0][k].terms).any() for k in SHAPES)
    assert not any(np.asarray(r).any() for r in jax.tree.leaves(plain[1][0]))


@pytest.mark.parametrize("microbatches", [1, 2])
def test_where_there_are_no_terms(microbatches: int) -> None:
    """Whole gradients are refused unless they are held anyway; so are gradients that
    come summed."""
    x = drawn((16, WIDTH), 1)
    with pytest.raises(shardfn.ShardingError) as caught:
        sharded, state = fed(
            summing(mlp, microbatches), drawn(SHAPES), (4,), accumulate="auto"
        )
        sharded.plan(state, x)
    message = str(caught.value)
    assert message.startswith(
        "the gradient of '0/a' has no terms over mesh axis 'data' to feed a residual "
        "to: its terms are whole gradients: 2304 bytes on each device.\n  at "
    )
    assert (
        "Pass accumulate='defer', which keeps them so anyway, or feed back" in message
    )

    def step(state, x):
        params, residuals = state
        grads = jax.grad(mlp)(params, x)
        norm = sum(jnp.square(g).sum() for g in jax.tree.leaves(grads))
        grads, residuals = error_feedback(grads, residuals)
        return (jax.tree.map(lambda w, g: w - g / norm, params, grads), residuals), norm

    with pytest.raises(shardfn.ShardingError) as caught:
        sharded, state = fed(step, drawn(SHAPES), (2, 2))
        sharded.plan(state, x)
    message = str(caught.value)
    assert "feed a residual to: it comes there summed.\n" in message
    assert "and call error_feedback outside of lax.cond and before" in message


def test_residuals_that_are_not_used_are_warned_of() -> None:
    sharded, state = fed(summing(mlp), drawn(SHAPES), (2, 2), dtype=None)
    with pytest.warns(shardfn.ResidualWarning) as caught:
        sharded.plan(state, drawn((16, WIDTH), 1))
    assert str(caught[0].message).startswith(
        "error_feedback has nothing to feed back to '0/a', '0/b': sums over mesh axis "
        "'replica' are exact, and residuals of 1728 bytes a device stay zero.\n  at "
    )
    assert "reduce_dtype={'replica': 'int8'}, or pass None" in str(caught[0].message)


def test_residuals_of_something_else() -> None:
    grads = drawn(SHAPES)
    mesh = cpu_mesh(2)
    made = zero_residuals(grads | {"n": jnp.zeros(3, int)}, mesh, "data")
    assert made == {"a": None, "b": None, "n": None}, "few elements"
    same, none = error_feedback(grads, {"a": None, "b": None})
    assert same == grads and none == {"a": None, "b": None}
    rows = zero_residuals(grads, mesh, "data", min_size=0)
    for residuals, text in (
        ({"a": rows["a"]}, "whose structure is another: "),
        (rows | {"a": jnp.zeros(3)}, "where 'a' has a ArrayImpl"),
        (rows | {"a": rows["b"]}, "where 'a' has the shape (36, 8) and its gradient"),
    ):
        with pytest.raises(shardfn.ShardingError) as caught:
            error_feedback(grads, residuals)
        message = str(caught.value)
        assert f"was given residuals of other gradients, {text}" in message
        assert "Pass what shardfn.zero_residuals makes of the parameters" in message
    with pytest.raises(shardfn.ShardingError) as caught:
        zero_residuals(grads, mesh, "dcn")
    assert str(caught.value).startswith(
        "zero_residuals was given mesh axis 'dcn', and the mesh has ('data',).\n"
    )
    sharded, _ = fed(summing(mlp), grads, (4,))
    with pytest.raises(shardfn.ShardingError) as caught:
        sharded.shard((grads, rows))
    assert str(caught.value).startswith(
        "state leaf '1/a/terms' has 2 rows of terms, and mesh axis 'data' has 4 devices"
    )


def test_residuals_on_the_host() -> None:
    """They come to the device and go back, and hold the same bits."""
    x, runs = drawn((16, WIDTH), 1), []
    for offload in (None, {"1/*": "host"}):
        step, params = summing(mlp, rate=0.1), drawn(SHAPES)
        sharded, state = fed(step, params, (2, 2), offload=offload)
        for _ in range(2):
            state, _ = sharded(state, x)
        runs.append(jax.device_get(state))
    jax.tree.map(np.testing.assert_array_equal, *runs)


def test_steps_that_are_written_per_device() -> None:
    def step(state, x):
        params, residuals = state
        grads, residuals = error_feedback(jax.grad(mlp)(params, x), residuals)
        grads = lax.pmean(grads, ("replica", "data"))
        return (jax.tree.map(lambda w, g: w - g, params, grads), residuals), x.sum()

    with pytest.raises(shardfn.ShardingError) as caught:
        sharded, state = fed(step, drawn(SHAPES), (2, 2))
        sharded.plan(state, drawn((16, WIDTH), 1))
    message = str(caught.value)
    assert "in a step that is written per device, where each gradient is one" in message
    assert "Call it outside of jax.vmap, and write the step for all rows" in message
