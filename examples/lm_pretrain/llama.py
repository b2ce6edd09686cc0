"""A Llama-style decoder in flax.nnx: tokens in, next-token logits out.

Rotary positions, RMS norms, SwiGLU, and fewer heads of keys and values than of queries.
Parameters are float32; the blocks compute in `config.dtype`. Shapes: see `attention`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from attention import PADDING, attend_by_blocks, rotate, visible
from config import ModelConfig
from flax import nnx


class Tokens(NamedTuple):
    """Where tokens stand: their position in their document, and what they may see."""

    positions_BxT: jax.Array
    visible_BxTxS: jax.Array
    start: jax.Array | int  # place of the first one in the cache


class Cache(NamedTuple):
    """Keys and values of the tokens so far, and the document each belongs to."""

    k_LxBxSxGxK: jax.Array
    v_LxBxSxGxK: jax.Array
    segments_BxS: jax.Array


def empty_cache(config: ModelConfig, batch_size: int, length: int) -> Cache:
    shape = (config.layers, batch_size, length, config.kv_heads, config.head_width)
    zeros = jnp.zeros(shape, config.dtype)
    return Cache(zeros, zeros, jnp.full((batch_size, length), PADDING, jnp.int32))


def linear(config: ModelConfig, ins: int, outs: int, scale: float, rngs: nnx.Rngs):
    return nnx.Linear(
        *(ins, outs),
        use_bias=False,
        dtype=config.dtype,
        kernel_init=nnx.initializers.normal(0.02 * scale),
        rngs=rngs,
    )


class Attention(nnx.Module):
    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        D, K = config.width, config.head_width
        self.config = config
        self.q = linear(config, D, config.heads * K, 1.0, rngs)
        self.k = linear(config, D, config.kv_heads * K, 1.0, rngs)
        self.v = linear(config, D, config.kv_heads * K, 1.0, rngs)
        self.out = linear(config, config.heads * K, D, config.residual_scale, rngs)

    def __call__(self, x_BxTxD: jax.Array, tokens: Tokens, cache):
        """Returns the result and the keys and values, with those of `cache` if any."""
        c = self.config
        heads = (*x_BxTxD.shape[:2], -1, c.head_width)
        q_BxTxHxK = rotate(
            self.q(x_BxTxD).reshape(heads), tokens.positions_BxT, c.rope_base
        )
        k = rotate(self.k(x_BxTxD).reshape(heads), tokens.positions_BxT, c.rope_base)
        v = self.v(x_BxTxD).reshape(heads)
        if cache is not None:
            at = (0, tokens.start, 0, 0)
            k = jax.lax.dynamic_update_slice(cache[0], k, at)
            v = jax.lax.dynamic_update_slice(cache[1], v, at)
        out_BxTxHxK = attend_by_blocks(
            q_BxTxHxK, k, v, tokens.visible_BxTxS, c.attention_block
        )
        return self.out(out_BxTxHxK.reshape(*heads[:2], -1)), (k, v)


class SwiGLU(nnx.Module):
    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        D, F = config.width, config.mlp_width
        self.gate = linear(config, D, F, 1.0, rngs)
        self.up = linear(config, D, F, 1.0, rngs)
        self.down = linear(config, F, D, config.residual_scale, rngs)

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.gate(x_BxTxD)) * self.up(x_BxTxD))


class Block(nnx.Module):
    """Attention and an MLP, each behind a norm and added to its input."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(config.width, dtype=config.dtype, rngs=rngs)
        self.attention = Attention(config, rngs)
        self.mlp_norm = nnx.RMSNorm(config.width, dtype=config.dtype, rngs=rngs)
        self.mlp = SwiGLU(config, rngs)

    def __call__(self, x_BxTxD: jax.Array, tokens: Tokens, cache):
        out_BxTxD, cache = self.attention(self.attention_norm(x_BxTxD), tokens, cache)
        x_BxTxD += out_BxTxD
        return x_BxTxD + self.mlp(self.mlp_norm(x_BxTxD)), cache


class Llama(nnx.Module):
    """Blocks under one `scan`, recomputed in the backward pass."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=config.layers)
        @nnx.vmap
        def stack(rngs: nnx.Rngs) -> Block:
            return Block(config, rngs)

        self.config = config
        self.embedding = nnx.Embed(
            *(config.vocabulary, config.width),
            embedding_init=nnx.initializers.normal(0.02),
            rngs=rngs,
        )
        self.blocks = stack(rngs)
        self.final_norm = nnx.RMSNorm(config.width, dtype=config.dtype, rngs=rngs)
        if not config.tied:
            self.head = linear(config, config.width, config.vocabulary, 1.0, rngs)

    def __call__(
        self, tokens_BxT: jax.Array, segments_BxT: jax.Array, positions_BxT: jax.Array
    ) -> jax.Array:
        """Returns logits [B, T, V]; tokens see those before them in their segment."""
        seen = visible(segments_BxT, segments_BxT)
        x_BxTxD, _ = self.layers(tokens_BxT, Tokens(positions_BxT, seen, 0), None)
        return self.logits(x_BxTxD)

    def extend(
        self,
        tokens_BxT: jax.Array,
        segments_BxT: jax.Array,
        positions_BxT: jax.Array,
        cache: Cache,
        start: jax.Array | int,
    ) -> tuple[jax.Array, Cache]:
        """Returns the last token's logits [B, V]; the cache gets the T from `start`."""
        segments_BxS = jax.lax.dynamic_update_slice(
            cache.segments_BxS, segments_BxT, (0, start)
        )
        seen = visible(segments_BxT, segments_BxS, start)
        x_BxTxD, (k, v) = self.layers(
            tokens_BxT, Tokens(positions_BxT, seen, start), cache[:2]
        )
        return self.logits(x_BxTxD[:, -1:])[:, 0], Cache(k, v, segments_BxS)

    def layers(self, tokens_BxT: jax.Array, tokens: Tokens, cache):
        # A row's gradient is a sum over every place its token stands in, and bfloat16
        # would round most of those terms away: the look-up is in float32.
        x_BxTxD = self.embedding(tokens_BxT).astype(self.config.dtype)

        @nnx.scan(in_axes=(nnx.Carry, 0, 0), out_axes=(nnx.Carry, 0))
        @nnx.remat(prevent_cse=False)  # scan already keeps the two apart
        def scan(x_BxTxD, block, cache):
            x_BxTxD, kv = block(x_BxTxD, tokens, cache)
            return x_BxTxD, None if cache is None else kv

        return scan(x_BxTxD, self.blocks, cache)

    def logits(self, x_BxTxD: jax.Array) -> jax.Array:
        x_BxTxD = self.final_norm(x_BxTxD)
        if self.config.tied:
            return self.embedding.attend(x_BxTxD).astype(jnp.float32)
        return self.head(x_BxTxD).astype(jnp.float32)
