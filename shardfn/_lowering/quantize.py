"""Writes local values in blocks of bytes with a scale each, and reads them back.

In: a local block of a value, and how it is quantized. Out: its bytes, of which any part
that is cut on the edges of shards can be read by itself.
"""

import jax
import jax.numpy as jnp
from jax import lax

from shardfn._core.quantized import SCALE_BYTES, SCALE_DTYPE, Quantized


def pack(x: jax.Array, how: Quantized, salt: jax.Array | int = 0) -> jax.Array:
    """The bytes of `x`, as int8: along `how.dim`, the elements and then their scales.

    A block in which something is not finite is NaN when it is read.

    Args:
      x: floats.
      how: into which blocks of what.
      salt: tells devices apart that round the same values by chance.

    Returns:
      int8, of the shape `how.packed(x.shape)`.
    """
    blocks = _parted(x, how.dim, how.block).astype(jnp.float32)
    at, largest = how.dim + 1, _largest(how.dtype)
    scale = (jnp.abs(blocks).max(axis=at) / largest).astype(SCALE_DTYPE)
    each = jnp.expand_dims(scale.astype(jnp.float32), at)
    scaled = jnp.where((each > 0) & jnp.isfinite(each), blocks / each, 0)
    payload = _rounded(scaled, blocks, how, salt).reshape(x.shape)
    scales = jnp.moveaxis(lax.bitcast_convert_type(scale, jnp.int8), -1, at)
    scales = scales.reshape(*x.shape[: how.dim], -1, *x.shape[how.dim + 1 :])
    return lax.concatenate([payload, scales], how.dim)


def unpack(
    packed: jax.Array, how: Quantized, pieces: int, dtype: jnp.dtype
) -> jax.Array:
    """What `pack` wrote, in `dtype`.

    Args:
      packed: bytes.
      how: how they were written.
      pieces: of how many shards, one behind the other along `how.dim`.
      dtype: of the result.

    Returns:
      The values, each less than half a step of its block's scale off.
    """
    dim, at = how.dim, how.dim + 1
    rows = _parted(packed, dim, packed.shape[dim] // pieces)
    count = rows.shape[at] // (how.block + SCALE_BYTES)
    payload = lax.slice_in_dim(rows, 0, count * how.block, axis=at)
    scales = lax.slice_in_dim(rows, count * how.block, None, axis=at)
    values = _parted(payload, at, how.block)
    if how.dtype != "int8":
        values = lax.bitcast_convert_type(values, how.dtype)
    scales = jnp.moveaxis(_parted(scales, at, SCALE_BYTES), at + 1, -1)
    each = lax.bitcast_convert_type(scales, SCALE_DTYPE).astype(jnp.float32)
    whole = values.astype(jnp.float32) * jnp.expand_dims(each, at + 1)
    shape = (*packed.shape[:dim], pieces * count * how.block, *packed.shape[dim + 1 :])
    return whole.reshape(shape).astype(dtype)


def _parted(x: jax.Array, dim: int, size: int) -> jax.Array:
    """`x` with a dimension in parts of `size`, which are a dimension behind it."""
    return x.reshape(*x.shape[:dim], -1, size, *x.shape[dim + 1 :])


def _largest(dtype: str) -> float:
    info = jnp.iinfo if dtype == "int8" else jnp.finfo
    return float(info(dtype).max)


def _rounded(
    scaled: jax.Array, values: jax.Array, how: Quantized, salt: jax.Array | int
) -> jax.Array:
    """Elements of `how.dtype`, as int8."""
    largest, dtype = _largest(how.dtype), jnp.dtype(how.dtype)
    if how.rounding == "stochastic":
        scaled = _by_chance(scaled, _noise(values, salt), dtype)
    elif how.dtype == "int8":
        scaled = jnp.round(scaled)
    made = jnp.clip(scaled, -largest, largest).astype(dtype)
    return made if how.dtype == "int8" else lax.bitcast_convert_type(made, jnp.int8)


def _by_chance(scaled: jax.Array, noise: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The neighbour above or below among the numbers of `dtype`, the likelier the
    nearer."""
    if dtype == jnp.int8:
        return jnp.floor(scaled + noise)
    info = jnp.finfo(dtype)
    _, exponent = jnp.frexp(scaled)
    lowest = jnp.frexp(float(info.smallest_normal))[1]
    step = jnp.ldexp(jnp.float32(1), jnp.maximum(exponent, lowest) - 1 - info.nmant)
    return jnp.floor(scaled / step + noise) * step


def _noise(values: jax.Array, salt: jax.Array | int) -> jax.Array:
    """Numbers from 0 to 1 that depend on the bits of values, where these stand, and
    `salt`: the same in each run of the same step, with no state."""
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    places = lax.iota(jnp.uint32, values.size).reshape(values.shape)
    key = _mixed(places + _mixed(jnp.asarray(salt, jnp.uint32)))
    return (_mixed(bits ^ key) >> 8).astype(jnp.float32) * jnp.float32(2**-24)


def _mixed(x: jax.Array) -> jax.Array:
    """The finalizer of MurmurHash3: each bit depends on all."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
