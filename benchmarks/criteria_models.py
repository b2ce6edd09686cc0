"""A GPT, a Llama and a T5 in plain JAX as one would write them for one device, and the
step that trains them: AdamW, clipping by global norm, bfloat16 compute, float32 state.

The only concession to the baselines is `Hand`: what a user who shards by hand would
write into the model. The unedited model's does nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from criteria_cases import Model

Params = Any
BUCKETS = 32
STACKS = ("layers", "encoder", "decoder")
SCORES = "attention_scores"
"""Scope of what fused attention does not write to memory."""


@dataclass(frozen=True)
class Hand:
    """What is written into a model by hand.

    Attributes:
      weights: on the cast weights of a layer, embedding or head where they are used;
        it is given the name of their subtree.
      activations: on activations between layers.
      policy: what a layer without remat saves for its backward pass.
    """

    weights: Callable[[Any, str], Any] = lambda tree, path: tree
    activations: Callable[[jax.Array], jax.Array] = lambda x: x
    policy: Callable[..., Any] | None = None


UNEDITED = Hand()


def init(model: Model) -> Params:
    """Parameters from nothing: only their shapes are ever asked for."""
    D, V = model.width, model.vocabulary
    params = {"embedding": jnp.zeros((V, D)), "norm": jnp.ones(D)}
    if model.family == "t5":
        for stack in ("encoder", "decoder"):
            params[stack] = _stack(model, cross=stack == "decoder")
            params[f"{stack}_bias"] = jnp.zeros((BUCKETS, model.heads))
        return params | {"encoder_norm": jnp.ones(D)}
    params["layers"] = _stack(model)
    if model.family == "gpt":
        return params | {"positions": jnp.zeros((model.context, D))}
    return params | {"head": jnp.zeros((D, V))}


def _stack(model: Model, cross: bool = False) -> Params:
    layers = [_layer(model, cross) for _ in range(model.layers)]
    return jax.tree.map(lambda *x: jnp.stack(x), *layers) if model.scan else layers


def _layer(model: Model, cross: bool) -> Params:
    D, H, K, F = model.width, model.heads, model.head_width, model.mlp_width

    def attention() -> Params:
        counts = {"q": H, "k": model.kv_heads or H, "v": model.kv_heads or H}
        heads = {name: jnp.zeros((D, count, K)) for name, count in counts.items()}
        return {"norm": jnp.ones(D), **heads, "out": jnp.zeros((H, K, D))}

    mlp = {"norm": jnp.ones(D), "in": jnp.zeros((D, F)), "out": jnp.zeros((F, D))}
    if model.family == "gpt":
        mlp |= {"in_bias": jnp.zeros(F), "out_bias": jnp.zeros(D)}
    if model.family == "llama":
        mlp |= {"gate": jnp.zeros((D, F))}
    return {
        "attention": attention(),
        "mlp": mlp,
        **({"cross": attention()} if cross else {}),
    }


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
    return wide.astype(x.dtype) * scale


def rotate(x_BxTxHxK: jax.Array) -> jax.Array:
    _, T, _, K = x_BxTxHxK.shape
    rate_K = 10000.0 ** (-jnp.arange(K // 2, dtype=jnp.float32) / (K // 2))
    angle_TxK = jnp.arange(T, dtype=jnp.float32)[:, None] * rate_K
    cos, sin = (f(angle_TxK)[:, None, :] for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x_BxTxHxK.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return turned.astype(x_BxTxHxK.dtype)


def attend(w: Params, x, memory, model: Model, bias, causal: bool) -> jax.Array:
    """`bias`: None, or `[H, T, S]` that is added to the scores."""
    q, k, v = (
        jnp.einsum("btd,dhk->bthk", y, w[name])
        for name, y in (("q", x), ("k", memory), ("v", memory))
    )
    if model.family == "llama":
        q, k = rotate(q), rotate(k)
    if model.fused and bias is None:
        with jax.named_scope(SCORES):
            mixed = jax.nn.dot_product_attention(
                *(q, k, v), is_causal=causal, implementation="cudnn"
            )
        return jnp.einsum("bthk,hkd->btd", mixed, w["out"])
    if model.kv_heads:
        k, v = (jnp.repeat(x, model.heads // model.kv_heads, axis=2) for x in (k, v))
    with jax.named_scope(SCORES):
        scores = jnp.einsum("bthk,bshk->bhts", q, k).astype(jnp.float32)
        scores = scores * model.head_width**-0.5
        if bias is not None:
            scores = scores + bias
        if causal:
            T, S = scores.shape[2:]
            scores = jnp.where(jnp.tril(jnp.ones((T, S), bool)), scores, -1e30)
        weights = jax.nn.softmax(scores).astype(x.dtype)
    mixed = jnp.einsum("bhts,bshk->bthk", weights, v)
    return jnp.einsum("bthk,hkd->btd", mixed, w["out"])


def mlp(w: Params, x: jax.Array, model: Model) -> jax.Array:
    h = x @ w["in"]
    if model.family == "gpt":
        return jax.nn.gelu(h + w["in_bias"]) @ w["out"] + w["out_bias"]
    if model.family == "llama":
        return (jax.nn.silu(x @ w["gate"]) * h) @ w["out"]
    return jax.nn.relu(h) @ w["out"]


def run_stack(layers, x, model, hand: Hand, path, *, bias=None, memory=None, causal):
    def one(x: jax.Array, layer: Params) -> jax.Array:
        w = hand.weights(narrow(layer), path)
        y = norm(x, w["attention"]["norm"])
        x = x + attend(w["attention"], y, y, model, bias, causal)
        if memory is not None:
            y = norm(x, w["cross"]["norm"])
            x = x + attend(w["cross"], y, memory, model, None, False)
        x = x + mlp(w["mlp"], norm(x, w["mlp"]["norm"]), model)
        return hand.activations(x)

    body = one
    if model.remat or hand.policy:
        policy = None if model.remat else hand.policy
        body = jax.checkpoint(one, prevent_cse=not model.scan, policy=policy)
    if model.scan:
        return jax.lax.scan(lambda x, w: (body(x, w), None), x, layers)[0]
    for layer in layers:
        x = body(x, layer)
    return x


def narrow(tree: Params) -> Params:
    return jax.tree.map(lambda w: w.astype(jnp.bfloat16), tree)


def distances(table_BxH: jax.Array, T: int, causal: bool) -> jax.Array:
    """T5's relative position bias `[H, T, T]`, buckets of equal width."""
    back = jnp.arange(T)[:, None] - jnp.arange(T)
    back = jnp.maximum(back, 0) if causal else jnp.abs(back)
    return jnp.moveaxis(table_BxH[jnp.minimum(back, BUCKETS - 1)], -1, 0)


def mean_loss(params: Params, batch: Any, model: Model, hand: Hand = UNEDITED):
    """Mean cross-entropy in nats of the rows of `batch`."""

    once = narrow({k: w for k, w in params.items() if k not in STACKS})

    def use(name: str) -> jax.Array:
        return hand.weights(once[name], name)

    def embed(tokens: jax.Array) -> jax.Array:
        return hand.activations(use("embedding")[tokens])

    def stack(name: str, x: jax.Array, **options: Any) -> jax.Array:
        return run_stack(params[name], x, model, hand, name, **options)

    def near(name: str, causal: bool) -> jax.Array:
        return distances(params[f"{name}_bias"], model.context, causal)

    x = embed(batch["inputs"])
    if model.family == "t5":
        x = stack("encoder", x, bias=near("encoder", False), causal=False)
        memory = norm(x, use("encoder_norm"))
        x, bias = embed(batch["decoder_inputs"]), near("decoder", True)
        x = stack("decoder", x, bias=bias, memory=memory, causal=True)
    else:
        if model.family == "gpt":
            x = x + use("positions")
        x = stack("layers", x, causal=True)
    x = norm(x, use("norm"))
    head = use("head") if model.family == "llama" else use("embedding").T
    logits = hand.activations((x @ head).astype(jnp.float32))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return jnp.mean(losses)
