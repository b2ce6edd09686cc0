"""In: two variants. Out: decoder-only transformers with rotary positions, RMS norm,
SwiGLU and grouped queries, in flax.linen with einsum, unrolled and scanned.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from ._data import tokens
from ._program import Program, register

VOCAB, WIDTH, HIDDEN, HEADS, KV_HEADS, HEAD = 101, 36, 163, 6, 2, 8


def rotate(x_BxTxHxD):
    """Rotary position embedding, positions counted from zero."""
    length, width = x_BxTxHxD.shape[1], x_BxTxHxD.shape[3]
    frequency = 1e4 ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    angle = jnp.arange(length, dtype=jnp.float32)[:, None] * frequency
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    even, odd = jnp.split(x_BxTxHxD, 2, axis=-1)
    return jnp.concatenate((even * cos - odd * sin, odd * cos + even * sin), axis=-1)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        normal = nn.initializers.normal(0.1)

        def weight(name, *shape):
            return self.param(name, normal, shape)

        h = nn.RMSNorm()(x)
        q = jnp.einsum("btd,dhk->bthk", h, weight("q", WIDTH, HEADS, HEAD))
        kv = jnp.einsum("btd,cdhk->cbthk", h, weight("kv", 2, WIDTH, KV_HEADS, HEAD))
        h = jax.nn.dot_product_attention(
            rotate(q), rotate(kv[0]), kv[1], is_causal=True
        )
        x = x + jnp.einsum("bthk,hkd->btd", h, weight("o", HEADS, HEAD, WIDTH))
        h = nn.RMSNorm()(x)
        h = nn.silu(h @ weight("gate", WIDTH, HIDDEN)) * (
            h @ weight("up", WIDTH, HIDDEN)
        )
        return x + h @ weight("down", HIDDEN, WIDTH), None


class Llama(nn.Module):
    scan: bool

    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(VOCAB, WIDTH)(ids)
        if self.scan:
            layers = nn.scan(
                nn.remat(Block, prevent_cse=False),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=3,
            )
            x, _ = layers(name="layers")(x, None)
        else:
            for i in range(2):
                x, _ = Block(name=f"layer_{i}")(x, None)
        return nn.Dense(VOCAB, use_bias=False)(nn.RMSNorm()(x))


def build(name: str, scan: bool) -> Program:
    """The program that trains `Llama(scan)` with Adam and z-loss."""
    model, tx = Llama(scan), optax.adam(1e-3, b2=0.95, eps=1e-5)

    def init(key):
        params = model.init(key, jnp.zeros((1, 7), jnp.int32))
        return {"params": params, "opt": tx.init(params)}

    def train_step(state, batch):
        def loss_fn(params):
            logits = model.apply(params, batch["tokens"])
            log_z = jax.nn.logsumexp(logits, axis=-1)
            picked = jnp.take_along_axis(logits, batch["labels"][..., None], axis=-1)
            return (log_z - picked[..., 0]).mean() + 1e-3 * (log_z**2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, {"loss": loss}

    return Program(name, init, train_step, tokens)


@register("llama")
def llama() -> Program:
    return build("llama", scan=False)


@register("llama_scan_remat")
def llama_scan_remat() -> Program:
    return build("llama_scan_remat", scan=True)
