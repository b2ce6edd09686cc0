"""In: steps written for one device of many, as for `jax.pmap`. Out: under `fully_shard`
they mean what they mean under `pmap`, and the mean of a gradient is a reduce-scatter.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardfn
from shardfn.storage._stored_array import stored_array

AXIS = "batch"
Step = Callable[..., Any]


def mesh_of(count: int = 8) -> jax.sharding.Mesh:
    return jax.make_mesh((count,), (AXIS,), devices=jax.devices()[:count])


def sharded(step: Step, count: int = 8, **options: Any) -> shardfn.ShardedStep:
    options = {"axis": AXIS, "min_size": 8, "donate": False} | options
    return shardfn.fully_shard(step, mesh_of(count), **options)


def under_pmap(step: Step, state: Any, batch: Any, *rest: Any, count: int = 8) -> Any:
    """State and metrics under `pmap`, as `fully_shard` has them: what is equal on all
    devices once, the rest joined along dimension 0. `rest` is the same everywhere."""
    in_axes = (None, 0, *[None] * len(rest))
    devices = jax.devices()[:count]
    run = jax.pmap(step, axis_name=AXIS, in_axes=in_axes, devices=devices)
    blocks = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)
    state, metrics = jax.device_get(run(state, blocks, *rest))
    for new in jax.tree.leaves(state):
        np.testing.assert_array_equal(new, np.broadcast_to(new[:1], new.shape))
    return jax.tree.map(lambda x: x[0], state), metrics


def assert_like_pmap(step: Step, *args: Any, exact: bool = False, count: int = 8):
    """Two steps under both; the first's new state is what the second starts from."""
    run = sharded(step, count)
    state, stored = args[0], run.shard(args[0])
    for _ in range(2):
        state, expected = under_pmap(step, state, *args[1:], count=count)
        stored, metrics = run(stored, *args[1:])
        joined = jax.tree.map(_joined, expected, metrics)
        for got, want in zip(
            jax.tree.leaves((run.unshard(stored), metrics)),
            jax.tree.leaves((state, joined)),
            strict=True,
        ):
            assert got.dtype == want.dtype
            if exact:
                np.testing.assert_array_equal(got, want)
            else:
                np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    return run, metrics


def _joined(stacked: np.ndarray, metric: jax.Array) -> np.ndarray:
    if metric.shape == stacked.shape[1:]:
        same = np.broadcast_to(stacked[:1], stacked.shape)
        np.testing.assert_array_equal(stacked, same)
        return stacked[0]
    return stacked if stacked.ndim == 1 else stacked.reshape(-1, *stacked.shape[2:])


def integer(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Small integers: means over 8 devices and 16 rows of them are exact."""
    values = np.random.default_rng(seed).integers(-2, 3, shape)
    return values.astype(np.float32)


W, X = integer((12, 5), 0), integer((16, 12), 1)


def loss_fn(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.sum((x @ w) ** 2, -1))


def averaged(w, x):
    loss, grad = jax.value_and_grad(loss_fn)(w, x)
    grad, loss = lax.pmean((grad, loss), AXIS)
    return w - grad / 4, {"loss": loss}


def summed(w, x):
    loss, grad = jax.value_and_grad(loss_fn)(w, x)
    count = lax.psum(1, AXIS)
    total = jax.tree.map(lambda g: lax.psum(g, AXIS) / count, grad)
    return w - total / 4, {"loss": lax.psum(loss, AXIS), "count": count}


def in_nested_jit(w, x):
    return jax.jit(averaged)(w, x)


def in_scan(w, x):
    def micro(w, rows):
        return w - lax.pmean(jax.grad(loss_fn)(w, rows[None]), AXIS) / 4, rows.sum()

    return lax.scan(micro, w, x)


def in_cond(w, x):
    new, metrics = averaged(w, x)
    return lax.cond(metrics["loss"] > 0, lambda: new, lambda: w), metrics


def in_remat(w, x):
    def loss(w):
        centered = jax.checkpoint(lambda y: y - lax.pmean(y, AXIS))(x @ w)
        return jnp.mean(jnp.sum(centered * x[:, :5], -1))

    return w - lax.pmean(jax.grad(loss)(w), AXIS), {}


EXACT = [averaged, summed, in_nested_jit, in_scan, in_cond, in_remat]


@pytest.mark.parametrize("step", EXACT, ids=lambda step: step.__name__)
def test_means_and_sums_equal_pmap(step: Step) -> None:
    run, _ = assert_like_pmap(step, W / 4, X, exact=True)
    assert stored_array(run.shard(W)).addressable_shards[0].data.size < W.size


@pytest.mark.parametrize("count", [1, 2, 4])
def test_any_device_count(count: int) -> None:
    run, _ = assert_like_pmap(averaged, W / 4, X, exact=True, count=count)
    assert (run.plan(W, X).collectives == ()) == (count == 1)


def noisy(w, x, key):
    key = jax.random.fold_in(key, lax.axis_index(AXIS))
    new, metrics = averaged(w, x)
    noise = {"noise": jax.random.normal(key, (2,)), "rank": lax.axis_index(AXIS)}
    return new, metrics | noise


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_noise_of_each_device(make_key) -> None:
    key = make_key(7)
    _, metrics = assert_like_pmap(noisy, W / 4, X, key, exact=True)
    assert metrics["rank"].tolist() == [*range(8)]
    assert len({*metrics["noise"].tolist()}) == 16


COLLECTIVES = {
    "pmax": lambda x: lax.pmax(x, AXIS),
    "pmin": lambda x: lax.pmin(x.min(), AXIS),
    "axis_size": lambda x: x * lax.axis_size(AXIS),
    "all_gather": lambda x: lax.all_gather(x, AXIS),
    "all_gather of scalars": lambda x: lax.all_gather(x.sum(), AXIS),
    "all_gather tiled": lambda x: lax.all_gather(x, AXIS, tiled=True),
    "psum_scatter": lambda x: lax.psum_scatter(x[0, :8], AXIS, tiled=True),
    "all_to_all": lambda x: lax.all_to_all(x[0, :8], AXIS, 0, 0, tiled=True),
    "ppermute": lambda x: lax.ppermute(x, AXIS, [(i, (i + 1) % 8) for i in range(8)]),
    "pshuffle": lambda x: lax.pshuffle(x, AXIS, [*range(7, -1, -1)]),
}


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_collective(collective: str) -> None:
    def step(w, x):
        return averaged(w, x)[0], {"out": COLLECTIVES[collective](x)}

    assert_like_pmap(step, W / 4, X, exact=True)


def contrastive(params, batch):
    """In-batch negatives of the whole batch, gathered as in CLIP."""

    def loss(params):
        towers = {k: jnp.tanh(batch[k] @ params[k]) for k in ("image", "text")}
        everyone = lax.all_gather(towers["text"], AXIS, tiled=True)
        rows = len(towers["image"])
        labels = lax.axis_index(AXIS) * rows + jnp.arange(rows)
        logits = towers["image"] @ everyone.T
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    value, grads = jax.value_and_grad(loss)(params)
    new = jax.tree.map(lambda p, g: p - lax.pmean(g, AXIS) / 8, params, grads)
    return new, {"loss": lax.pmean(value, AXIS)}


def test_a_contrastive_loss_on_gathered_embeddings() -> None:
    params = {"image": W / 8, "text": integer((12, 5), 2) / 8}
    assert_like_pmap(contrastive, params, {"image": X, "text": X[::-1] + 1})


class Net(nn.Module):
    """Batch statistics over all devices, and dropout."""

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.Dense(11)(x)
        x = nn.BatchNorm(not train, momentum=0.5, axis_name=AXIS)(x)
        x = nn.Dropout(0.5, deterministic=not train)(nn.relu(x))
        return nn.Dense(3)(x)


@pytest.mark.standard_promotion
def test_batch_norm_and_dropout_of_flax() -> None:
    model, tx = Net(), optax.adam(1e-2)
    variables = model.init(jax.random.key(0), X, train=False)
    state = dict(variables, opt=tx.init(variables["params"]))

    def step(state, x, key):
        key = jax.random.fold_in(key, lax.axis_index(AXIS))

        def loss_fn(params):
            y, new = model.apply(
                {"params": params, "batch_stats": state["batch_stats"]},
                x,
                train=True,
                mutable=["batch_stats"],
                rngs={"dropout": key},
            )
            return jnp.mean((y - x[:, :3]) ** 2), (new, y)

        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, (new, y)), grads = grad_fn(state["params"])
        updates, opt = tx.update(lax.pmean(grads, AXIS), state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        metrics = {"loss": lax.pmean(loss, AXIS), "y": y}
        return dict(params=params, **new, opt=opt), metrics

    _, metrics = assert_like_pmap(step, state, X + 0.5, jax.random.key(3))
    assert metrics["y"].shape == (16, 3)


# What comes back, and what moves


def test_the_mean_of_a_gradient_is_a_reduce_scatter() -> None:
    plan = sharded(averaged).plan(W, X)
    found = [(c.op, c.phase, c.shape) for c in plan.collectives]
    assert ("psum_scatter", "update", (12, 5)) in found
    assert Counter(op for op, _, shape in found if shape == (12, 5)) == {
        "all_gather": 1,
        "psum_scatter": 1,
    }
    assert [op for op, _, shape in found if shape == ()] == ["all_reduce"]
    assert not plan.fallbacks


def test_the_plan_is_that_of_the_plain_step() -> None:
    """A per-device step moves no byte more than the global one."""

    def plain(w, x):
        loss, grad = jax.value_and_grad(loss_fn)(w, x)
        return w - grad / 4, {"loss": loss}

    mine, its = sharded(averaged).plan(W, X), sharded(plain).plan(W, X)
    assert mine.wire_bytes == its.wire_bytes
    assert Counter(c.op for c in mine.collectives) == Counter(
        c.op for c in its.collectives
    )


def test_metrics_are_unstacked_or_joined() -> None:
    def step(w, x):
        new, metrics = averaged(w, x)
        return new, metrics | {"own": x.sum(), "rows": x[:, 0], "table": x[0]}

    _, metrics = sharded(step)(W, X)
    assert metrics["loss"].shape == () and metrics["loss"].is_fully_replicated
    assert metrics["own"].shape == (8,)
    np.testing.assert_array_equal(metrics["own"], X.reshape(8, -1).sum(-1))
    np.testing.assert_array_equal(metrics["rows"], X[:, 0])
    np.testing.assert_array_equal(metrics["table"], X[::2].reshape(-1))
    assert metrics["rows"].sharding.spec == P(AXIS)


def test_batch_spec() -> None:
    """A replicated argument is whole on every device."""

    def step(w, x, table):
        return averaged(w, x @ table)

    table = np.eye(12, dtype=np.float32)[::-1]
    run = sharded(step, batch_spec=(None, P()))
    state, metrics = run(W / 4, X, table)
    expected, its = under_pmap(step, W / 4, X, table)
    np.testing.assert_array_equal(run.unshard(state), expected)
    assert metrics["loss"] == its["loss"][0]


@pytest.mark.parametrize("axis", ["dp.0", "my axis"])
def test_any_name_of_the_mesh_axis(axis: str) -> None:
    """What JAX says of an unbound axis holds the name as it is."""

    def step(w, x):
        return w - lax.pmean(x.mean(0), axis), lax.psum(x.sum(), axis)

    mesh = jax.sharding.Mesh(jax.devices(), (axis,))
    run = shardfn.fully_shard(step, mesh, axis=axis, min_size=0, donate=False)
    x = jnp.arange(64.0).reshape(8, 8)
    new, total = run(jnp.ones(8), x)
    assert new.tolist() == (1 - x.mean(0)).tolist() and total == x.sum()


@pytest.mark.parametrize("form", ["alone", "in a dict", "None", "in a tuple"])
def test_a_step_per_device_that_returns_no_state(form: str) -> None:
    """The state is read only; nothing is no result."""

    def step(state, x):
        mean = lax.pmean(jnp.sum(x) + jnp.sum(state["w"]), "data")
        forms = {"alone": mean, "in a dict": {"m": mean}, "in a tuple": (mean, x)}
        return forms.get(form)

    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    run = shardfn.fully_shard(step, mesh, min_size=4)
    args = {"w": jnp.ones(8)}, jnp.ones(8)
    if form == "None":
        with pytest.raises(shardfn.ShardingError, match="^step returns no state: it r"):
            run(*args)
        return
    assert jax.tree.leaves(run(*args))[0] == 2 + 8
