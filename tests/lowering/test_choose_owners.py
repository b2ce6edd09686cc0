"""In: updates that take whole matrices of stacked layers: Muon's Newton-Schulz
iterations and Shampoo's roots. Out: plans in which each device has layers of its own,
the bytes of two all-to-alls, and the numbers of the plain step."""

import jax
import jax.numpy as jnp
import optax
import pytest

import shardfn
from shardfn.testing import assert_parity

pytestmark = pytest.mark.standard_promotion  # of optax
MESH = jax.make_mesh((8,), ("data",))
WIDTH, INNER = 128, 256


def parameters(layers: int, width: int, inner: int) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0))
    up = jax.random.normal(keys[0], (layers, width, inner)) / 8
    return {"up": up, "down": jax.random.normal(keys[1], (layers, inner, width)) / 8}


def loss(p, x):
    def layer(x, w):
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    return jnp.square(jax.lax.scan(layer, x, p)[0]).mean()


def muon():
    def dims(p):
        return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(1, 2), p)

    return optax.contrib.muon(1e-2, muon_weight_dimension_numbers=dims)


def muon_step(state, x):
    value, grads = jax.value_and_grad(loss)(state["p"], x)
    updates, o = muon().update(grads, state["o"], state["p"])
    return {"p": optax.apply_updates(state["p"], updates), "o": o}, value


def shampoo_step(state, x):
    """Shampoo (Gupta et al., arXiv:1802.09568): the inverse fourth roots of both
    statistics, by eigenvalues."""

    def root(m):
        values, vectors = jnp.linalg.eigh(m + 1e-3 * jnp.eye(m.shape[-1]))
        scaled = vectors * jnp.maximum(values, 1e-6)[..., None, :] ** -0.25
        return jnp.einsum("lij,lkj->lik", scaled, vectors)

    value, grads = jax.value_and_grad(loss)(state["p"], x)
    new = {"p": {}, "left": {}, "right": {}}
    for name, g in grads.items():
        left = state["left"][name] + jnp.einsum("lij,lkj->lik", g, g)
        right = state["right"][name] + jnp.einsum("lji,ljk->lik", g, g)
        step = jnp.einsum("lij,ljk,lkm->lim", root(left), g, root(right))
        new["p"][name] = state["p"][name] - 1e-3 * step
        new["left"][name], new["right"][name] = left, right
    return new, value


def state_of(step, layers):
    if step is muon_step:
        p = parameters(layers, WIDTH, INNER)
        return {"p": p, "o": muon().init(p)}
    p = parameters(layers, 48, 64)
    eye = {n: [jnp.eye(w.shape[d])[None] for d in (1, 2)] for n, w in p.items()}
    sides = ({n: jnp.repeat(eye[n][i], layers, 0) for n in p} for i in range(2))
    return {"p": p, **dict(zip(("left", "right"), sides, strict=True))}


def update_lines(step, state, x):
    plan = shardfn.fully_shard(step, MESH, min_size=0).plan(state, x)
    large = [c for c in plan.collectives if c.phase == "update" and len(c.shape) == 3]
    return plan, large


@pytest.mark.parametrize("step", [muon_step, shampoo_step])
def test_each_device_updates_its_own_layers(step):
    state = state_of(step, 8)
    width = state["p"]["up"].shape[1]
    x = jax.random.normal(jax.random.key(1), (8 * width, width)) / 4
    plan, large = update_lines(step, state, x)
    assert {line.op for line in large} == {"all_to_all"}
    assert "\nwhole matrices by owners: " in str(plan)
    if step is muon_step:  # two per leaf: to the owners, and back
        assert sum(line.times for line in large) == 4
        size = 4 * 8 * WIDTH * INNER / 8 * 7 / 8
        assert sum(line.wire_bytes for line in large) == 4 * size
    assert plan.work.replicated == 0
    assert_parity(step, MESH, state, x, min_size=0, tol=1e-4, verify="error")


def test_layers_that_devices_do_not_divide_are_gathered_and_divided():
    state, x = state_of(muon_step, 13), jnp.ones((512, WIDTH)) / 4
    plan, large = update_lines(muon_step, state, x)
    assert {line.op for line in large} == {"all_gather"}
    assert "8 devices do not divide 13 layers, which are gathered" in str(plan)
    assert_parity(muon_step, MESH, state, x, min_size=0, tol=1e-4, steps=1)


def test_fewer_layers_than_devices_are_said_to_stay():
    plan, _ = update_lines(muon_step, state_of(muon_step, 4), jnp.ones((512, WIDTH)))
    assert "not by owners: '4x128x256': fewer matrices than devices" in str(plan)
