"""What both models share: rotary positions, and attention inside documents.

Shapes stand in names: B batch, T tokens of a window, S tokens that may be looked at, D
width, H heads, G heads of keys and values, K width of one head, F width of the MLP, V
vocabulary, L layers.
"""

from typing import Any

import jax
import jax.numpy as jnp

PADDING = -1
"""The target of a token that counts for nothing, and the segment of no document."""


def rotate(x_BxTxHxK: jax.Array, positions_BxT: jax.Array, base: float = 1e4):
    """Turns pairs of coordinates by an angle that grows with the position (RoPE)."""
    K = x_BxTxHxK.shape[3]
    frequency_k = base ** (-jnp.arange(0, K, 2, dtype=jnp.float32) / K)
    angle_BxTxk = positions_BxT[..., None].astype(jnp.float32) * frequency_k
    cos, sin = (
        f(angle_BxTxk)[:, :, None].astype(x_BxTxHxK.dtype) for f in (jnp.cos, jnp.sin)
    )
    a, b = jnp.split(x_BxTxHxK, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def visible(
    segments_BxT: jax.Array, segments_BxS: jax.Array, start: Any = 0
) -> jax.Array:
    """Returns which of S tokens each of T may look at: those of its document up to it.

    The first of the T tokens stands at place `start` among the S.
    """
    T, S = segments_BxT.shape[1], segments_BxS.shape[1]
    causal_TxS = jnp.arange(S) <= start + jnp.arange(T)[:, None]
    same_BxTxS = segments_BxT[:, :, None] == segments_BxS[:, None, :]
    return same_BxTxS & causal_TxS


def attend(
    q_BxTxHxK: jax.Array,
    k_BxSxGxK: jax.Array,
    v_BxSxGxK: jax.Array,
    visible_BxTxS: jax.Array,
) -> jax.Array:
    """Attention with H / G queries to a key; the softmax runs in float32."""
    B, T, H, K = q_BxTxHxK.shape
    G = k_BxSxGxK.shape[2]
    q_BxTxGxRxK = q_BxTxHxK.reshape(B, T, G, H // G, K)
    scores_BxGxRxTxS = jnp.einsum("btgrk,bsgk->bgrts", q_BxTxGxRxK, k_BxSxGxK)
    scores_BxGxRxTxS = scores_BxGxRxTxS.astype(jnp.float32) * K**-0.5
    scores_BxGxRxTxS = jnp.where(visible_BxTxS[:, None, None], scores_BxGxRxTxS, -1e9)
    weights_BxGxRxTxS = jax.nn.softmax(scores_BxGxRxTxS).astype(v_BxSxGxK.dtype)
    out_BxTxGxRxK = jnp.einsum("bgrts,bsgk->btgrk", weights_BxGxRxTxS, v_BxSxGxK)
    return out_BxTxGxRxK.reshape(B, T, H, K)


def attend_by_blocks(
    q_BxTxHxK: jax.Array,
    k_BxSxGxK: jax.Array,
    v_BxSxGxK: jax.Array,
    visible_BxTxS: jax.Array,
    block: int,
) -> jax.Array:
    """`attend` to `block` queries at a time, or T x S scores of every head would exist
    at once; the backward pass computes each block's again."""
    B, T, H, K = q_BxTxHxK.shape
    if T <= block or T % block:
        return attend(q_BxTxHxK, k_BxSxGxK, v_BxSxGxK, visible_BxTxS)

    def blocks(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(B, T // block, block, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def one(parts: tuple[jax.Array, jax.Array]) -> jax.Array:
        return attend(parts[0], k_BxSxGxK, v_BxSxGxK, parts[1])

    out = jax.lax.map(one, (blocks(q_BxTxHxK), blocks(visible_BxTxS)))
    return jnp.moveaxis(out, 0, 1).reshape(B, T, H, K)
