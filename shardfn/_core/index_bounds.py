"""What JAX does with an index that lies outside of an array.

In: an index, and the array. Out: the place where JAX moves its window, or an index that
nothing has; and what is read in its place.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def clamped(index: jax.Array, limit: int) -> jax.Array:
    """An index as JAX moves it, between 0 and `limit`, as int32.

    It is compared in its own dtype: one of uint32 or int64 may be none of int32, and
    `limit` none of a narrow dtype.
    """
    bound = min(limit, int(jnp.iinfo(index.dtype).max))
    zero, bound = (jnp.asarray(n, index.dtype) for n in (0, bound))
    return lax.clamp(zero, index, bound).astype(jnp.int32)


def in_bounds(index: jax.Array, size: int) -> jax.Array:
    """An index as int32, far below zero if it is not one of `size` elements: what a
    device has in front of its block is less, so it is written nowhere."""
    largest = int(jnp.iinfo(index.dtype).max)
    inside = index >= 0
    if size <= largest:
        inside &= index < jnp.asarray(size, index.dtype)
    return jnp.where(inside, index.astype(jnp.int32), jnp.iinfo(jnp.int32).min // 2)


def fill_of(params: Any, dtype: Any) -> Any:
    """What a gather that fills gives for what lies outside, by its parameters: what JAX
    gives for `dtype`, unless a step says what."""
    if params["fill_value"] is not None:
        return params["fill_value"]
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.nan
    if dtype == np.dtype(bool):
        return True
    info = jnp.iinfo(dtype)
    return info.min if jnp.issubdtype(dtype, jnp.signedinteger) else info.max
