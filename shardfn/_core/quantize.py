"""Writes local values in blocks of bytes with a scale each, and reads them back.

In: a local block of a value, and how it is quantized. Out: its elements and its scales,
apart or in one array, of which any part that is cut on the edges of blocks can be read
by itself.
"""

import jax
import jax.numpy as jnp
from jax import lax

from shardfn._core.line_names import DEQUANTIZED, QUANTIZED
from shardfn._core.quantized import SCALE_BITS, SCALE_BYTES, SCALE_DTYPE, Quantized


def quantize(
    x: jax.Array, how: Quantized, salt: jax.Array | int = 0
) -> tuple[jax.Array, jax.Array]:
    """The elements and scales of `x`, as bits: no backend widens these on the way.

    A block in which something is not finite is NaN when it is read.

    Args:
      x: floats.
      how: into which blocks of what.
      salt: tells devices apart that round the same values by chance.

    Returns:
      int8 of the shape of `x`, and `SCALE_BITS` of the shape `how.scales(x.shape)`.
    """
    with jax.named_scope(QUANTIZED):
        blocks = _parted(x, how.dim, how.block).astype(jnp.float32)
        at, largest = how.dim + 1, _largest(how.dtype)
        scale = (jnp.abs(blocks).max(axis=at) / largest).astype(SCALE_DTYPE)
        each = jnp.expand_dims(scale.astype(jnp.float32), at)
        scaled = jnp.where((each > 0) & jnp.isfinite(each), blocks / each, 0)
        payload = _rounded(scaled, blocks, how, salt).reshape(x.shape)
        return payload, lax.bitcast_convert_type(scale, SCALE_BITS)


def dequantize(
    payload: jax.Array, scales: jax.Array, how: Quantized, dtype: jnp.dtype
) -> jax.Array:
    """What `quantize` wrote, in `dtype`, each less than half a step of its scale off.

    The scales are spread before anything is split into blocks, and in bfloat16 where
    that is the dtype: so XLA can read the bytes inside of the matmul that uses them
    (see `xla_options`). The product of an element and a scale is rounded once.
    """
    with jax.named_scope(DEQUANTIZED):
        wide = dtype if dtype == SCALE_DTYPE else jnp.dtype(jnp.float32)
        values = payload
        if how.dtype != "int8":
            values = lax.bitcast_convert_type(payload, how.dtype)
        each = lax.bitcast_convert_type(scales, SCALE_DTYPE).astype(wide)
        behind = how.dim + 1
        spread = (*each.shape[:behind], how.block, *each.shape[behind:])
        each = jnp.broadcast_to(jnp.expand_dims(each, behind), spread)
        return (values.astype(wide) * each.reshape(payload.shape)).astype(dtype)


def pack(x: jax.Array, how: Quantized, salt: jax.Array | int = 0) -> jax.Array:
    """What `quantize` makes of `x` in one array of int8: along `how.dim`, the elements
    and then the scales."""
    payload, scales = quantize(x, how, salt)
    with jax.named_scope(QUANTIZED):
        bytes_ = jnp.moveaxis(as_bytes(scales), -1, how.dim + 1)
        shape = (*x.shape[: how.dim], -1, *x.shape[how.dim + 1 :])
        return lax.concatenate([payload, bytes_.reshape(shape)], how.dim)


def unpack(packed: jax.Array, how: Quantized, dtype: jnp.dtype) -> jax.Array:
    """What `pack` wrote, in `dtype`."""
    dim = how.dim
    with jax.named_scope(DEQUANTIZED):
        size = packed.shape[dim] // (how.block + SCALE_BYTES) * how.block
        payload = lax.slice_in_dim(packed, 0, size, axis=dim)
        bytes_ = lax.slice_in_dim(packed, size, None, axis=dim)
        bytes_ = jnp.moveaxis(_parted(bytes_, dim, SCALE_BYTES), dim + 1, -1)
    return dequantize(payload, of_bytes(bytes_), how, dtype)


def as_bytes(scales: jax.Array) -> jax.Array:
    """Scales as int8, which are a dimension behind theirs."""
    return lax.bitcast_convert_type(scales, jnp.int8)


def of_bytes(bytes_: jax.Array) -> jax.Array:
    """Scales that were given as int8."""
    return lax.bitcast_convert_type(bytes_, SCALE_BITS)


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
