"""In: steps written for `jax.pmap` whose batch statistics differ from device to device.
Out: with `per_device_state`, what each device has under `pmap`, over several steps;
without, an error that names the leaves and the cure.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import shardfn

pytestmark = pytest.mark.standard_promotion

AXIS, COUNT = "batch", 4
TX = optax.adam(1e-2)
X = np.random.default_rng(0).normal(size=(16, 6)).astype(np.float32)


class Net(nn.Module):
    """Batch statistics of each device's own rows: no `axis_name`."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Dense(11, use_bias=False)(x)  # a bias would have no gradient
        x = nn.BatchNorm(not train, momentum=0.5)(x)
        return nn.Dense(3)(nn.relu(x))


def create(key: jax.Array) -> dict[str, Any]:
    variables = Net().init(key, jnp.zeros((2, 6)), train=False)
    return dict(variables, opt=TX.init(variables["params"]))


def step(state: Any, x: jax.Array) -> tuple[Any, Any]:
    def loss_fn(params: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": state["batch_stats"]}
        y, new = Net().apply(variables, x, train=True, mutable=["batch_stats"])
        return jnp.mean((y - x[:, :3]) ** 2), new

    (loss, new), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
    grads = lax.pmean(grads, AXIS)
    updates, opt = TX.update(grads, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return dict(params=params, opt=opt, **new), {"loss": lax.pmean(loss, AXIS)}


def sharded(fn: Any = step, shape: tuple[int, ...] = (COUNT,), **options: Any):
    names = (AXIS,) if len(shape) == 1 else ("replica", AXIS)
    mesh = jax.make_mesh(shape, names, devices=jax.devices()[:COUNT])
    axis = AXIS if len(shape) == 1 else names
    return shardfn.fully_shard(fn, mesh, axis=axis, min_size=8, **options)


KEPT = {"per_device_state": ("batch_stats/*",)}


def test_each_device_keeps_what_it_has_under_pmap() -> None:
    devices = jax.devices()[:COUNT]
    under_pmap = jax.pmap(step, axis_name=AXIS, devices=devices)
    whole = create(jax.random.key(0))
    expected = jax.tree.map(lambda x: jnp.stack([x] * COUNT), whole)
    run = sharded(**KEPT)
    state = run.init(create, jax.random.key(0))
    for i in range(4):
        x = X + i
        expected, its = under_pmap(expected, x.reshape(COUNT, -1, 6))
        state, metrics = run(state, x)
        got = run.unshard(state)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6),
            got["batch_stats"],
            jax.device_get(expected["batch_stats"]),
        )
        for part in ("params", "opt"):
            first = jax.tree.map(lambda x: np.asarray(x)[0], expected[part])
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6),
                got[part],
                first,
            )
        np.testing.assert_allclose(metrics["loss"], its["loss"][0], rtol=1e-5)
    means = np.asarray(got["batch_stats"]["BatchNorm_0"]["mean"])
    assert len(np.unique(means[:, 0])) == COUNT
    for leaf in jax.tree.leaves(state["batch_stats"]):
        assert len(leaf.addressable_shards[0].data) == 1
    assert not [c for c in run.plan(state, X).collectives if "batch_stats" in c.path]


def counts(state: Any, x: jax.Array) -> tuple[Any, Any]:
    own = state["own"] * 2 + x.sum(0)
    grad = jax.grad(lambda w: jnp.sum(x @ w))(state["w"])
    new = {"w": state["w"] - lax.pmean(grad, ("replica", AXIS)), "own": own}
    return new | {"same": state["same"] + 1}, {"own": own}


def test_two_mesh_axes_and_a_leaf_that_stays_the_same() -> None:
    whole = {"w": jnp.ones((6, 8)), "own": jnp.ones(6), "same": jnp.zeros(())}
    x = np.round(X)
    run = sharded(counts, (2, 2), per_device_state=("own", "same"), donate=False)
    state = run.shard(whole)
    for _ in range(2):
        state, metrics = run(state, x)
    rows = x.reshape(COUNT, -1, 6).sum(1)
    np.testing.assert_array_equal(state["own"], 4 + 3 * rows)
    np.testing.assert_array_equal(metrics["own"], (4 + 3 * rows).reshape(-1))
    np.testing.assert_array_equal(state["same"], np.full(COUNT, 2))
    assert run.shardings(state)["own"].spec[0] == ("replica", AXIS)


def test_the_error_names_the_leaves_and_the_cure() -> None:
    run = sharded()
    with pytest.raises(
        shardfn.ShardingError,
        match=r"^state leaf 'batch_stats/BatchNorm_0/mean' would differ between "
        r"devices: step computes it from its own part of the batch and never averages "
        r"it\. So would 'batch_stats/BatchNorm_0/var'\.\n(.*\n)Average the gradients "
        r"over the mesh axis first: .*If they are averaged and it is a statistic of "
        r"the batch, average that too, or let each device have its own, as under "
        r"jax\.pmap: per_device_state=\('batch_stats/\*',\) keeps it\.",
    ):
        run(run.init(create, jax.random.key(0)), X)


def test_what_per_device_state_cannot_be() -> None:
    with pytest.raises(shardfn.ShardingError, match=r"^per_device_state cannot be 'a'"):
        sharded(per_device_state="a")
    with pytest.raises(shardfn.ShardingError, match=r"matches no leaf of the state"):
        sharded(per_device_state=("statistics",)).init(create, jax.random.key(0))
    with pytest.raises(
        shardfn.ShardingError,
        match=r"^per_device_state=\('batch_stats/\*',\) needs a mesh: without one the "
        r"step sees what one device holds, and nothing else\.",
    ):
        shardfn.fully_shard(step, axis=AXIS, per_device_state=("batch_stats/*",))
    with pytest.raises(
        shardfn.ShardingError,
        match=r"^state leaf 'batch_stats/BatchNorm_0/mean' has shape \(11,\), and "
        r"per_device_state needs a row for each of 4 devices\.",
    ):
        sharded(**KEPT)(create(jax.random.key(0)), X)
