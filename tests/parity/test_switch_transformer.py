"""In: a Switch transformer (Fedus et al., arXiv:2101.03961) that routes tokens by
one-hots or by sorting. Out: it trains as on one device, its experts in no collective.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from plan_helpers import QUICK, cpu_mesh
from tiers import tiered

import shardfn
from shardfn.testing import assert_same

pytestmark = pytest.mark.standard_promotion

ROWS, TOKENS, VOCAB, WIDTH, HIDDEN, LAYERS = 16, 12, 104, 24, 40, 2
EXPERTS, CAPACITY = 8, 3
TX = optax.sgd(0.3, momentum=0.9)  # smooth: rounding decides no sign


def norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def attend(x: jax.Array, w: Any) -> jax.Array:
    q, k, v = (norm(x) @ w[name] for name in ("q", "k", "v"))
    scores = jnp.einsum("btd,bsd->bts", q, k) / WIDTH**0.5
    scores = jnp.where(jnp.tri(TOKENS, dtype=bool), scores, -1e9)
    return jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), v)


def by_one_hots(x: jax.Array, chosen: jax.Array, gate: jax.Array, experts: Any) -> Any:
    """A token's place is the number of those before it, in its row, for its expert."""
    mask = jax.nn.one_hot(chosen, EXPERTS)
    place = ((jnp.cumsum(mask, 1) - 1) * mask).sum(-1).astype(jnp.int32)
    sent = mask[..., None] * jax.nn.one_hot(place, CAPACITY)[:, :, None]
    taken = jnp.einsum("gtec,gtd->egcd", sent, x)
    made = run_experts(taken, experts)
    return jnp.einsum("gtec,egcd->gtd", sent * gate[..., None, None], made)


def by_sorting(x: jax.Array, chosen: jax.Array, gate: jax.Array, experts: Any) -> Any:
    """Tokens sorted by expert; those beyond the capacity are left out."""
    order = jnp.argsort(chosen, 1, stable=True)
    first = jax.vmap(lambda c: jnp.searchsorted(jnp.sort(c), jnp.arange(EXPERTS)))(
        chosen
    )
    place = jnp.argsort(order, 1) - jnp.take_along_axis(first, chosen, 1)
    slots = jnp.minimum(first[..., None] + jnp.arange(CAPACITY), TOKENS - 1)
    rows = jnp.take_along_axis(order, slots.reshape(len(x), -1), 1)
    taken = jnp.take_along_axis(x, rows[..., None], 1)
    taken = taken.reshape(len(x), EXPERTS, CAPACITY, WIDTH)
    made = run_experts(taken.transpose(1, 0, 2, 3), experts)
    made = made.transpose(1, 0, 2, 3).reshape(len(x), EXPERTS * CAPACITY, WIDTH)
    inside = place < CAPACITY
    back = chosen * CAPACITY + jnp.minimum(place, CAPACITY - 1)
    return jnp.take_along_axis(made, back[..., None], 1) * (gate * inside)[..., None]


def run_experts(taken: jax.Array, experts: Any) -> jax.Array:
    hidden = jax.nn.relu(jnp.einsum("egcd,edf->egcf", taken, experts["up"]))
    return jnp.einsum("egcf,efd->egcd", hidden, experts["down"])


ROUTES = {"one-hots": by_one_hots, "sorting": by_sorting}


def make_step(route: Any) -> Any:
    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, jax.Array]:
        x = x + attend(x, w)
        h = norm(x)
        gates = jax.nn.softmax(h @ w["router"])
        chosen = gates.argmax(-1)
        x = x + route(h, chosen, gates.max(-1), w["experts"])
        share = jax.nn.one_hot(chosen, EXPERTS).mean((0, 1))
        return x, EXPERTS * (share * gates.mean((0, 1))).sum()

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x, balance = jax.lax.scan(
            layer, params["table"][batch["tokens"]], params["layers"]
        )
        logits = norm(x) @ params["table"].T
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits, batch["targets"]
        )
        return losses.mean() + 0.01 * balance.sum()

    def train_step(state: Any, batch: Any) -> Any:
        params, opt = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt = TX.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), {"loss": loss}

    return train_step


def make_state() -> Any:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(0, shape[-2] ** -0.5, shape), jnp.float32)

    layers = {name: normal(LAYERS, WIDTH, WIDTH) for name in ("q", "k", "v")}
    layers["router"] = 3 * normal(LAYERS, WIDTH, EXPERTS)
    layers["experts"] = {
        "up": normal(LAYERS, EXPERTS, WIDTH, HIDDEN),
        "down": normal(LAYERS, EXPERTS, HIDDEN, WIDTH),
    }
    params = {"table": normal(VOCAB, WIDTH), "layers": layers}
    return params, TX.init(params)


def make_batch(seed: int) -> Any:
    """Sentences in which a token depends on the one before."""
    rng = np.random.default_rng(seed)
    start = rng.integers(0, VOCAB, (ROWS, 1))
    text = (start + 5 * np.arange(TOKENS + 1)) % VOCAB
    return {
        "tokens": text[:, :-1].astype(np.int32),
        "targets": text[:, 1:].astype(np.int32),
    }


@pytest.mark.parametrize("route", tiered(ROUTES, ["sorting"]))
def test_a_switch_transformer_trains_as_on_one_device(route: str) -> None:
    train_step = make_step(ROUTES[route])
    step = shardfn.fully_shard(
        train_step,
        cpu_mesh(8),
        min_size=WIDTH,
        stationary={"*experts": True, "*": False},
        shard={"*experts": {"data": 1}},
        compiler_options=QUICK,
    )
    plain = make_state()
    state = step.shard(plain)
    run = jax.jit(train_step, compiler_options=QUICK)
    losses = []
    for k in range(4):
        plain, metrics = run(plain, make_batch(k))
        state, sharded = step(state, make_batch(k))
        assert_same(metrics, sharded, f"step {k + 1}, metrics", tol=1e-5)
        assert_same(plain, step.unshard(state), f"step {k + 1}, state", tol=1e-4)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.1, "it learns"
    moved = step.plan(state, make_batch(0)).collectives
    assert not [c for c in moved if "experts" in c.path]
    buffers = [c for c in moved if {EXPERTS, CAPACITY} <= {*c.shape} and c.elements > 1]
    assert {c.op for c in buffers} == {"all_to_all"}
