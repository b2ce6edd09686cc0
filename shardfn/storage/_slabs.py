"""Fills a shard that is too large for host memory in slabs.

In: a shard's place in the array that stores a leaf, and a function that fills boxes of
it in host memory. Out: the shard, on its devices.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardfn.storage._boxes import Index, size_in

Fill = Callable[[Sequence[Index]], list[np.ndarray]]
"""The values of boxes of the array."""


def in_slabs(
    whole: jax.ShapeDtypeStruct,
    index: Index,
    devices: Sequence[Any],
    limit: int,
    fill: Fill,
) -> list[jax.Array]:
    """The shard at `index` of an array, on each of `devices`.

    Args:
      whole: the array.
      index: where the shard is.
      devices: those that hold it.
      limit: bytes that are held besides, of a slab and of its copy on a device, unless
        one row is more.
      fill: see `Fill`.

    Returns:
      An array per device.
    """
    size = size_in(index, whole.shape)
    dim = next((d for d, n in enumerate(size) if n > 1), 0)
    row = math.prod(size) // size[dim] * whole.dtype.itemsize
    rows, first = max(limit // 2 // row, 1), index[dim].indices(whole.shape[dim])[0]
    shards = [jnp.zeros(size, whole.dtype, device=device) for device in devices]
    for start in range(0, size[dim], rows):
        stop = min(start + rows, size[dim])
        slab = slice(first + start, first + stop)
        _add_slab(shards, fill, (*index[:dim], slab, *index[dim + 1 :]), start, dim)
    return shards


def _add_slab(
    shards: list[jax.Array], fill: Fill, index: Index, start: int, dim: int
) -> None:
    """Fills a slab and writes it into the shards, in place."""
    (block,) = fill([index])
    for i, shard in enumerate(shards):
        slab = jax.device_put(block, shard.sharding)
        shards[i] = _with_slab(shard, slab, start, dim=dim)
    jax.block_until_ready(shards)  # the block is free when it is copied


@functools.partial(jax.jit, static_argnames="dim", donate_argnums=0)
def _with_slab(shard: jax.Array, slab: jax.Array, start: int, *, dim: int) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(shard, slab, start, dim)
