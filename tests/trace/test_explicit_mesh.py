"""In: steps that name shardings of an explicit mesh that is set. Out: the plain step's
numbers; outside of the mesh, the error that the plain step raises there.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P, reshard

import shardfn

ROWS = P("data", None)
RNG = np.random.default_rng(0)
PARAMS = {
    name: RNG.normal(size=shape).astype(np.float32) / 4
    for name, shape in {"in": (8, 12), "out": (12, 6), "layers": (3, 8, 8)}.items()
}
X = RNG.normal(size=(16, 8)).astype(np.float32)


def layers(params: Any, x: jax.Array) -> jax.Array:
    @jax.checkpoint
    def body(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(jnp.einsum("bi,ij->bj", h, w, out_sharding=ROWS)), None

    return lax.scan(body, x, params["layers"])[0]


def train(params: Any, x: jax.Array) -> tuple[Any, Any]:
    def loss_fn(params: Any) -> jax.Array:
        h = reshard(jnp.tanh(layers(params, x) @ params["in"]), ROWS)
        y = jnp.einsum("bi,ij->bj", h, params["out"], out_sharding=ROWS)
        return jnp.mean(y**2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    new = jax.tree.map(lambda w, g: w - g, params, grads)
    return new, {"loss": reshard(loss, P()), "rows": x[:, 0]}


def gathers(params: Any, x: jax.Array) -> tuple[Any, Any]:
    product = jax.jit(lambda: reshard(x @ params["in"], P(None, None)))
    positive = x.sum() > 0
    return params, lax.cond(positive, product, lambda: 2 * product()).sum(0)


@pytest.mark.parametrize("step", [train, gathers])
def test_a_step_that_names_shardings_of_the_mesh_that_is_set(step: Any) -> None:
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    run = shardfn.fully_shard(step, mesh, min_size=8, donate=False)
    with jax.set_mesh(mesh):
        params = jax.tree.map(lambda w: jax.device_put(w, P()), PARAMS)
        expected = jax.jit(step)(params, jax.device_put(X, P("data")))
        state, metrics = run(run.shard(PARAMS), X)
        state, expected = jax.device_get((run.unshard(state), expected))
    for got, want in zip(
        jax.tree.leaves((state, metrics)), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    plan = run.plan(PARAMS, X)
    assert not plan.fallbacks
    gathered = {c.shape for c in plan.collectives if c.op == "all_gather"}
    assert gathered and (16, 12) not in gathered


def test_without_the_mesh_it_is_jaxs_error() -> None:
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    run = shardfn.fully_shard(train, mesh, min_size=8)
    with pytest.raises(ValueError, match="when you are not under a mesh context"):
        run(PARAMS, X)


def test_the_state_is_found_where_it_stands() -> None:
    def step(x: Any, moments: Any, params: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            h = reshard(layers(params, x) @ params["in"], ROWS)
            return jnp.mean((h @ params["out"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
        return loss, jax.tree.map(lambda w, m: w - m, params, moments), moments

    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    run = shardfn.fully_shard(step, mesh, min_size=8, donate=False)
    with jax.set_mesh(mesh):
        params = jax.tree.map(lambda w: jax.device_put(w, P()), PARAMS)
        plain = (
            jax.device_put(X, P("data")),
            jax.tree.map(jnp.zeros_like, params),
            params,
        )
        mine = (X, *jax.tree.map(np.zeros_like, plain[1:2]), PARAMS)
        for _ in range(2):
            expected, out = jax.jit(step)(*plain), run(*mine)
            plain, mine = (plain[0], *expected[:0:-1]), (X, *out[:0:-1])
            got = jax.device_get((out[0], run.unshard(out[1:])))
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
                (got[0], *got[1]),
                jax.device_get(expected),
            )
    assert "state: argument 1 ('moments'), result 2; argument 2" in repr(run)
