"""A GPT in flax.linen: tokens in, next-token logits out. Shapes: see `attention`.

Parameters are float32; the blocks compute in `config.dtype`.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from attention import attend_by_blocks, rotate, visible
from config import ModelConfig


def weights(scale: float = 1.0) -> nn.initializers.Initializer:
    return nn.initializers.normal(0.02 * scale)


class Block(nn.Module):
    """Attention and an MLP, each behind a norm and added to its input."""

    config: ModelConfig
    train: bool

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array, positions_BxT, visible_BxTxT):
        def attention(x_BxTxD: jax.Array) -> jax.Array:
            return self.attention(x_BxTxD, positions_BxT, visible_BxTxT)

        x_BxTxD += self.dropout(attention(self.norm("attention_norm", x_BxTxD)))
        x_BxTxD += self.dropout(self.mlp(self.norm("mlp_norm", x_BxTxD)))
        return x_BxTxD, None

    def attention(self, x_BxTxD: jax.Array, positions_BxT, visible_BxTxT) -> jax.Array:
        heads = (*x_BxTxD.shape[:2], self.config.heads, self.config.head_width)
        qkv_BxTx3D = self.dense("qkv", 3 * self.config.width, x_BxTxD)
        q, k, v = (a.reshape(heads) for a in jnp.split(qkv_BxTx3D, 3, axis=-1))
        q, k = (rotate(a, positions_BxT, self.config.rope_base) for a in (q, k))
        out = attend_by_blocks(q, k, v, visible_BxTxT, self.config.attention_block)
        return self.to_residual("attention_out", out.reshape(x_BxTxD.shape))

    def mlp(self, x_BxTxD: jax.Array) -> jax.Array:
        hidden_BxTxF = nn.gelu(self.dense("mlp_in", self.config.mlp_width, x_BxTxD))
        return self.to_residual("mlp_out", hidden_BxTxF)

    def norm(self, name: str, x: jax.Array) -> jax.Array:
        return nn.RMSNorm(dtype=self.config.dtype, name=name)(x)

    def dense(self, name: str, features: int, x: jax.Array, scale: float = 1.0):
        layer = nn.Dense(
            features,
            use_bias=False,
            dtype=self.config.dtype,
            kernel_init=weights(scale),
            name=name,
        )
        return layer(x)

    def to_residual(self, name: str, x: jax.Array) -> jax.Array:
        return self.dense(name, self.config.width, x, self.config.residual_scale)

    def dropout(self, x: jax.Array) -> jax.Array:
        return nn.Dropout(self.config.dropout, deterministic=not self.train)(x)


class GPT(nn.Module):
    """Blocks under one `scan`, recomputed in the backward pass; a tied embedding."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        tokens_BxT: jax.Array,
        segments_BxT: jax.Array,
        positions_BxT: jax.Array,
        *,
        train: bool = False,
    ) -> jax.Array:
        # In float32: a row's gradient is a sum over every place its token stands in,
        # and bfloat16 would round most of those terms away.
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
            in_axes=nn.broadcast,
            length=self.config.layers,
        )
        seen = visible(segments_BxT, segments_BxT)
        x_BxTxD = embedding(tokens_BxT).astype(self.config.dtype)
        x_BxTxD, _ = blocks(self.config, train, name="blocks")(
            x_BxTxD, positions_BxT, seen
        )
        x_BxTxD = nn.RMSNorm(dtype=self.config.dtype, name="final_norm")(x_BxTxD)
        return embedding.attend(x_BxTxD)
