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


def newton_schulz_step(state, x):
    """Muon's iteration by hand, on the gradient itself (Jordan et al., 2024)."""
    value, grads = jax.value_and_grad(loss)(state["p"], x)

    def orthogonal(g):
        x = g / (jnp.linalg.norm(g, axis=(-2, -1), keepdims=True) + 1e-6)
        for _ in range(3):
            x = 1.5 * x - 0.5 * (x @ x.mT) @ x
        return x

    updates = jax.tree.map(orthogonal, grads)
    return {"p": jax.tree.map(lambda w, u: w - 1e-2 * u, state["p"], updates)}, value


def galore_step(state, x):
    """GaLore (Zhao et al., arXiv:2403.03507): moments of gradients projected on
    their first singular vectors."""
    value, grads = jax.value_and_grad(loss)(state["p"], x)
    new = {"p": {}, "m": {}}
    for name, g in grads.items():
        vectors, _, _ = jnp.linalg.svd(g, full_matrices=False)
        rank = state["m"][name].shape[1]
        basis = vectors[:, :, :rank] * jnp.sign(vectors[:, :1, :rank])
        moment = 0.9 * state["m"][name] + jnp.einsum("ldr,ldf->lrf", basis, g)
        new["m"][name] = moment
        new["p"][name] = state["p"][name] - 1e-2 * basis @ moment
    return new, value


def state_of(step, layers):
    if step in (muon_step, newton_schulz_step, galore_step):
        p = parameters(layers, WIDTH, INNER)
        if step is newton_schulz_step:
            return {"p": p}
        if step is galore_step:
            zeros = {k: jnp.zeros((layers, 4, w.shape[2])) for k, w in p.items()}
            return {"p": p, "m": zeros}
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


@pytest.mark.parametrize("step", [newton_schulz_step, galore_step])
def test_gradients_themselves_are_scattered_and_then_go_to_owners(step):
    """A loop over layers cannot leave its gradients split along the layers."""
    state = state_of(step, 16)
    x = jax.random.normal(jax.random.key(1), (8 * WIDTH, WIDTH)) / 4
    plan, _ = update_lines(step, state, x)
    weights = [c for c in plan.collectives if {WIDTH, INNER} <= {*c.shape}]
    sums = [c for c in weights if c.phase == "backward" and c.op != "all_gather"]
    assert {c.op for c in sums} == {"psum_scatter"}
    # To the owners and back, not around each product.
    update = [c for c in weights if c.phase == "update"]
    assert {c.op for c in update} == {"all_to_all"}
    assert sum(c.times for c in update) == 4
    assert plan.work.replicated == 0
    if step is newton_schulz_step:  # CPU devices wait for each other in LAPACK's SVD
        assert_parity(step, MESH, state, x, min_size=0, tol=1e-4)


STEPS = [muon_step, newton_schulz_step, shampoo_step, galore_step]


@pytest.mark.covering(1)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("layers", [13, 3])
def test_layers_that_devices_do_not_divide_are_padded_on_the_wire(
    step, layers, monkeypatch
):
    # Matrices of tests are too small for collectives more to be worth it.
    monkeypatch.setattr("shardfn._lowering.choose_owners.STATIONARY_BYTES", 0)
    monkeypatch.setattr("shardfn._lowering.replanning.STATIONARY_BYTES", 0)
    monkeypatch.setattr("shardfn._core.sent_bytes.LATENCY_BYTES", 0)
    state = state_of(step, layers)
    width, inner = state["p"]["up"].shape[1:]
    x = jax.random.normal(jax.random.key(1), (8 * width, width)) / 4
    plan, large = update_lines(step, state, x)
    # Statistics of Shampoo are stacks of square matrices.
    whole = {c.op for c in large if c.op != "psum_scatter" and width in c.shape}
    assert whole == {"all_to_all"}
    if step is muon_step:
        owns = -(-layers // 8) * 8
        size = 4 * owns * width * inner / 8 * 7 / 8
        assert sum(c.wire_bytes for c in large) == 4 * size
    if step in (muon_step, newton_schulz_step):
        asked = {"min_size": 0, "tol": 1e-4, "steps": 2, "verify": "error"}
        assert_parity(step, MESH, state, x, **asked)


def test_the_plan_says_who_owns_what():
    x = jnp.ones((512, WIDTH)) / 4
    plan, _ = update_lines(muon_step, state_of(muon_step, 13), x)
    said = "8 devices do not divide 13 layers: 6 of them own 2 each, the others what"
    assert said in str(plan)
    plan, _ = update_lines(muon_step, state_of(muon_step, 1), x)
    assert "not by owners: '1x128x256'" in str(plan)
    assert "one matrix each; a stack of layers" in str(plan)


def test_work_of_owners_is_that_of_the_one_with_most():
    """Of 9 layers on 8 devices some own two."""
    x = jnp.ones((512, WIDTH)) / 4
    work = {}
    for layers in (8, 9):
        plan, _ = update_lines(shampoo_step, state_of(shampoo_step, layers), x[:, :48])
        work[layers] = plan.work.flops
    decompositions = 2 * 9 * (48**3 + 64**3)
    assert work[9] - work[8] > decompositions


def mean_free_step(state, x):
    """The gradient without its mean over layers goes to the owners."""
    value, grads = jax.value_and_grad(loss)(state["p"], x)
    grads = jax.tree.map(lambda g: g - g.mean(0), grads)
    new = jax.tree.map(lambda p, g: p - 1e-2 * iterated(g), state["p"], grads)
    return {"p": new}, value


def skipped_step(state, x):
    """As `optax.apply_if_finite` does, whose branches read the gradient, too."""
    value, grads = jax.value_and_grad(loss)(state["p"], x)
    fine = jax.tree.reduce(
        jnp.logical_and, jax.tree.map(lambda g: jnp.isfinite(g).all(), grads)
    )
    updates = jax.lax.cond(
        fine,
        lambda g: jax.tree.map(iterated, g),
        lambda g: jax.tree.map(jnp.zeros_like, g),
        grads,
    )
    return {"p": jax.tree.map(lambda p, u: p - 1e-2 * u, state["p"], updates)}, value


def looped_step(state, x):
    """The iteration in a loop, whose products are no weights to be gathered."""
    value, grads = jax.value_and_grad(loss)(state["p"], x)
    new = jax.tree.map(
        lambda p, g: p - 1e-2 * jax.lax.fori_loop(0, 6, lambda i, x: fifth(x), g / 9),
        state["p"],
        grads,
    )
    return {"p": new}, value


def fifth(x):
    square = x @ x.mT
    return 1.9 * x + (-1.3 * square + 0.4 * square @ square) @ x


def cubed(x):
    return 1.5 * x - 0.5 * x @ (x.mT @ x)


def iterated(g):
    x = g / (jnp.linalg.norm(g, axis=(-2, -1), keepdims=True) + 1e-6)
    for _ in range(3):
        x = cubed(x)
    return x


@pytest.mark.parametrize("step", [mean_free_step, skipped_step, looped_step])
def test_gradients_that_others_read_too_are_scattered_to_owners(step, monkeypatch):
    """They were all-reduced in each layer, or gathered in each iteration."""
    monkeypatch.setattr("shardfn._lowering.choose_owners.STATIONARY_BYTES", 0)
    monkeypatch.setattr("shardfn._lowering.replanning.STATIONARY_BYTES", 0)
    monkeypatch.setattr("shardfn._core.sent_bytes.LATENCY_BYTES", 0)
    state = {"p": parameters(16, WIDTH, INNER)}
    x = jax.random.normal(jax.random.key(1), (8 * WIDTH, WIDTH)) / 4
    plan, _ = update_lines(step, state, x)
    matrices = [c for c in plan.collectives if {WIDTH, INNER} <= {*c.shape}]
    backward = [c for c in matrices if c.phase == "backward"]
    assert {c.op for c in backward} <= {"psum_scatter", "all_gather"}
    update = [c for c in matrices if c.phase == "update"]
    assert {c.op for c in update} == {"all_to_all"}
    assert sum(c.times for c in update) <= 8, "to the owners and back, in each branch"
    assert_parity(step, MESH, state, x, min_size=0, tol=1e-4)


def test_matrices_that_devices_do_not_divide_are_scattered_to_owners(monkeypatch):
    """Of 128 x 256 on 6 devices the last has less. Each layer's gradient was summed
    whole."""
    monkeypatch.setattr("shardfn._lowering.choose_owners.STATIONARY_BYTES", 0)
    monkeypatch.setattr("shardfn._lowering.replanning.STATIONARY_BYTES", 0)
    monkeypatch.setattr("shardfn._core.sent_bytes.LATENCY_BYTES", 0)
    monkeypatch.setattr("shardfn._propagation.loops.JOINED_BYTES", 0)
    mesh = jax.make_mesh((6,), ("data",), devices=jax.devices()[:6])
    state = {"p": parameters(24, WIDTH, INNER)}
    x = jax.random.normal(jax.random.key(1), (6 * WIDTH, WIDTH)) / 4
    plan = shardfn.fully_shard(newton_schulz_step, mesh, min_size=0).plan(state, x)
    matrices = [c for c in plan.collectives if {WIDTH, INNER} <= {*c.shape}]
    backward = [c for c in matrices if c.phase == "backward"]
    assert {c.op for c in backward} <= {"psum_scatter", "all_gather"}
    assert plan.work.replicated == 0
    assert_parity(newton_schulz_step, mesh, state, x, min_size=0, tol=1e-4)
