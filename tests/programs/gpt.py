"""In: variants of a config. Out: decoder-only transformers in flax.linen, trained by
AdamW: layers scanned or unrolled, with and without remat, tied, bfloat16, two masks,
two losses.
"""

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from ._data import tokens
from ._program import BFLOAT16_TOL, FLOAT32_TOL, Noisy, Program, register


@dataclass(frozen=True)
class Config:
    vocab: int = 101
    length: int = 7
    width: int = 36
    heads: int = 4
    hidden: int = 163
    layers: int = 2
    scan: bool = False
    remat: bool = False
    tied: bool = False
    bias: bool = False
    broadcast_mask: bool = False
    one_hot: bool = False
    dtype: Any = jnp.float32


class Block(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x, mask):
        c = self.config
        h = nn.LayerNorm(dtype=c.dtype, use_bias=False)(x)
        x = x + nn.MultiHeadDotProductAttention(
            num_heads=c.heads, dtype=c.dtype, use_bias=c.bias
        )(h, mask=mask)
        h = nn.LayerNorm(dtype=c.dtype)(x)
        h = nn.gelu(nn.Dense(c.hidden, dtype=c.dtype)(h))
        return x + nn.Dense(c.width, dtype=c.dtype)(h), None


class GPT(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, tokens):
        c = self.config
        rows, length = tokens.shape
        embed = nn.Embed(c.vocab, c.width, dtype=c.dtype, name="embed")
        position = self.param(
            "position", nn.initializers.normal(0.02), (c.length, c.width)
        )
        x = embed(tokens) + position.astype(c.dtype)
        if c.broadcast_mask:
            mask = jnp.tril(jnp.ones((length, length), bool))
            mask = jnp.broadcast_to(mask, (rows, c.heads, length, length))
        else:
            mask = nn.make_causal_mask(tokens, dtype=bool)
        block = nn.remat(Block, prevent_cse=not c.scan) if c.remat else Block
        if c.scan:
            layers = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=nn.broadcast,
                length=c.layers,
            )
            x, _ = layers(c, name="layers")(x, mask)
        else:
            for i in range(c.layers):
                x, _ = block(c, name=f"layer_{i}")(x, mask)
        x = nn.LayerNorm(dtype=c.dtype, name="norm")(x)
        if c.tied:
            return embed.attend(x)
        return nn.Dense(c.vocab, use_bias=False, dtype=c.dtype, name="head")(x)


def cross_entropy(logits, labels, one_hot: bool):
    """The mean cross entropy in float32, with one-hot or integer labels."""
    logits = logits.astype(jnp.float32)
    if one_hot:
        targets = jax.nn.one_hot(labels, logits.shape[-1])
        return -(targets * jax.nn.log_softmax(logits)).sum(-1).mean()
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def build(name: str, config: Config, **kwargs) -> Program:
    """The program that trains `GPT(config)`."""
    model = GPT(config)
    # bfloat16 rounds a sum that cancels to zero or not: with the usual eps Adam makes
    # a whole step of either.
    eps = 1e-3 if config.dtype == jnp.bfloat16 else 1e-8
    adamw = optax.adamw(1e-3, eps=eps, weight_decay=0.1)
    tx = optax.chain(optax.clip_by_global_norm(0.5), adamw)

    def init(key):
        ids = jnp.zeros((1, config.length), jnp.int32)
        params = model.init(key, ids)["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def train_step(state, batch):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["tokens"])
            return cross_entropy(logits, batch["labels"], config.one_hot)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
        if config.bias:
            attention = grads["layer_0"]["MultiHeadDotProductAttention_0"]
            biases = [attention[k]["bias"] for k in ("query", "key", "value")]
            metrics["bias_grads"] = jnp.stack(biases)
        return state.apply_gradients(grads=grads), metrics

    def batch(seed):
        return tokens(seed, config.length, config.vocab)

    return Program(name, init, train_step, batch, **kwargs)


EVEN = {"vocab": 96, "length": 8, "width": 32, "hidden": 64}
VARIANTS: dict[str, dict[str, Any]] = {
    "gpt_scan_remat": dict(scan=True, remat=True, layers=3),
    "gpt_scan_remat_one_hot": dict(scan=True, remat=True, one_hot=True, **EVEN),
    "gpt_scan_broadcast_mask": dict(scan=True, layers=3, broadcast_mask=True),
    "gpt_unrolled_remat": dict(remat=True, one_hot=True),
    "gpt_unrolled": dict(broadcast_mask=True),
    "gpt_tied": dict(tied=True),
    "gpt_tied_even": dict(tied=True, remat=True, one_hot=True, **EVEN),
    "gpt_scan_remat_bf16": dict(scan=True, remat=True, dtype=jnp.bfloat16, **EVEN),
    "gpt_tied_bf16": dict(tied=True, dtype=jnp.bfloat16),
}


def _register(name: str, changes: dict[str, Any]) -> None:
    config = Config(**changes)
    tol = BFLOAT16_TOL if config.dtype == jnp.bfloat16 else FLOAT32_TOL
    register(name)(lambda: build(name, config, tol=tol))


for _name, _changes in VARIANTS.items():
    _register(_name, _changes)


@register("gpt_key_bias")
def gpt_key_bias() -> Program:
    reason = (
        "softmax does not see a shift of all keys: the true gradient is zero, and Adam"
        " turns its rounding noise into steps; metrics hold the gradient"
    )
    noisy = (Noisy("key/bias", reason),)
    return build("gpt_key_bias", Config(bias=True, layers=1), noisy=noisy)
