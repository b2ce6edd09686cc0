"""A byte-level GPT in flax.linen: tokens in, next-token logits out.

Shapes stand in names: B batch, T tokens in a window, D width, H heads, K width of one
head, F width of the MLP, V vocabulary. Parameters are float32; the blocks compute in
bfloat16.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of the network; the defaults train on two CPU cores in a minute or two."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 128  # tokens in one training window
    vocabulary: int = 256  # one token per byte
    dropout: float = 0.0

    def __post_init__(self):
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width {self.width} does not split into {self.heads} heads of even "
                "width; make --model.width a multiple of 2 * --model.heads."
            )


def weights(scale: float = 1.0) -> nn.initializers.Initializer:
    return nn.initializers.normal(0.02 * scale)


def rotate(x_BxTxHxK: jax.Array) -> jax.Array:
    """Turns pairs of coordinates by an angle that grows with the position (RoPE)."""
    T, K = x_BxTxHxK.shape[1], x_BxTxHxK.shape[3]
    frequency_k = 10_000.0 ** (-jnp.arange(0, K, 2, dtype=jnp.float32) / K)
    angle_Txk = jnp.arange(T, dtype=jnp.float32)[:, None] * frequency_k
    cos, sin = (
        f(angle_Txk)[:, None, :].astype(x_BxTxHxK.dtype) for f in (jnp.cos, jnp.sin)
    )
    a, b = jnp.split(x_BxTxHxK, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def attend(q_BxTxHxK: jax.Array, k_BxTxHxK: jax.Array, v_BxTxHxK: jax.Array):
    """Causal attention; the softmax runs in float32."""
    T, K = q_BxTxHxK.shape[1], q_BxTxHxK.shape[3]
    scores_BxHxTxT = jnp.einsum("bqhk,bshk->bhqs", q_BxTxHxK, k_BxTxHxK)
    scores_BxHxTxT = scores_BxHxTxT.astype(jnp.float32) * K**-0.5
    causal_TxT = jnp.tril(jnp.ones((T, T), bool))
    scores_BxHxTxT = jnp.where(causal_TxT, scores_BxHxTxT, -1e9)
    weights_BxHxTxT = jax.nn.softmax(scores_BxHxTxT).astype(v_BxTxHxK.dtype)
    return jnp.einsum("bhqs,bshk->bqhk", weights_BxHxTxT, v_BxTxHxK)


class Block(nn.Module):
    """Attention and an MLP, each behind a norm and added to its input."""

    config: ModelConfig
    train: bool

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array, _: None) -> tuple[jax.Array, None]:
        x_BxTxD += self.dropout(self.attention(self.norm("attention_norm", x_BxTxD)))
        x_BxTxD += self.dropout(self.mlp(self.norm("mlp_norm", x_BxTxD)))
        return x_BxTxD, None

    def attention(self, x_BxTxD: jax.Array) -> jax.Array:
        H = self.config.heads
        heads = (*x_BxTxD.shape[:2], H, self.config.width // H)
        qkv_BxTx3D = self.dense("qkv", 3 * self.config.width, x_BxTxD)
        q, k, v = (a.reshape(heads) for a in jnp.split(qkv_BxTx3D, 3, axis=-1))
        out_BxTxHxK = attend(rotate(q), rotate(k), v)
        return self.to_residual("attention_out", out_BxTxHxK.reshape(x_BxTxD.shape))

    def mlp(self, x_BxTxD: jax.Array) -> jax.Array:
        hidden_BxTxF = nn.gelu(self.dense("mlp_in", 4 * self.config.width, x_BxTxD))
        return self.to_residual("mlp_out", hidden_BxTxF)

    def norm(self, name: str, x: jax.Array) -> jax.Array:
        return nn.RMSNorm(dtype=jnp.bfloat16, name=name)(x)

    def dense(self, name: str, features: int, x: jax.Array, scale: float = 1.0):
        layer = nn.Dense(
            features,
            use_bias=False,
            dtype=jnp.bfloat16,
            kernel_init=weights(scale),
            name=name,
        )
        return layer(x)

    def to_residual(self, name: str, x: jax.Array) -> jax.Array:
        # Each block adds twice; smaller weights keep the sum's size at any depth.
        scale = (2 * self.config.layers) ** -0.5
        return self.dense(name, self.config.width, x, scale)

    def dropout(self, x: jax.Array) -> jax.Array:
        return nn.Dropout(self.config.dropout, deterministic=not self.train)(x)


class GPT(nn.Module):
    """Blocks under one `scan`, recomputed in the backward pass; a tied embedding."""

    config: ModelConfig

    @nn.compact
    def __call__(self, tokens_BxT: jax.Array, *, train: bool = False) -> jax.Array:
        # In float32: a row's gradient is a sum over every place its byte stands in, and
        # bfloat16 would round most of those terms away.
        embedding = nn.Embed(
            self.config.vocabulary,
            self.config.width,
            dtype=jnp.float32,
            embedding_init=weights(),
            name="embedding",
        )
        blocks = nn.scan(
            nn.remat(Block, prevent_cse=False),  # scan already keeps the two apart
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=self.config.layers,
        )
        x_BxTxD = embedding(tokens_BxT).astype(jnp.bfloat16)
        x_BxTxD, _ = blocks(self.config, train, name="blocks")(x_BxTxD, None)
        x_BxTxD = nn.RMSNorm(dtype=jnp.bfloat16, name="final_norm")(x_BxTxD)
        return embedding.attend(x_BxTxD)
