"""Storage of leaves that no dimension divides: padded or flattened, and back.

In: a whole leaf and its stored sharding. Out: the stored array, and back.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from shardfn._core import compat
from shardfn._core.memories import on_device
from shardfn._core.sharding import Axes, Sharding, Split, flat, stored_shape, viewed


def to_stored(x: jax.Array, sharding: Sharding, axes: Axes) -> jax.Array:
    """A whole leaf in its stored shape, padded with zeros."""
    shape = stored_shape(x.shape, sharding, axes)
    if shape == x.shape:
        return x

    def padded(x: jax.Array) -> jax.Array:
        for split in sharding:
            if isinstance(split, Split):
                x = x.reshape(viewed(x.shape, split.dim)[0])
        pads = [(0, to - size) for size, to in zip(x.shape, shape, strict=True)]
        return jnp.pad(x, pads)

    with jax.transfer_guard("allow"):  # the zero comes from the host
        return on_device(padded, x)


def to_whole(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """The leaf of `shape` that a whole array of the stored shape stands for."""
    if tuple(x.shape) == tuple(shape):
        return x
    view = tuple(shape)
    if x.ndim < len(shape):
        view, _ = viewed(shape, flat(x.ndim - 1))
    inside = tuple(slice(0, size) for size in view)
    with jax.transfer_guard("allow"):  # so do the starts
        return on_device(lambda x: x[inside].reshape(shape), x)


def whole_spec(
    spec: PartitionSpec, stored: Sequence[int], shape: Sequence[int]
) -> PartitionSpec:
    """The PartitionSpec of a whole leaf, split only over dimensions that are stored as
    they are, from that of the array that stores it."""
    entries: list[Any] = [None] * len(shape)
    for dim, entry in enumerate(spec):
        if dim < len(shape) and stored[dim] == shape[dim]:
            entries[dim] = entry
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def zero_padding(
    x: jax.Array, shape: Sequence[int], sharding: Sharding, axes: Axes
) -> jax.Array:
    """A local block with its padding set to zero; inside `shard_map`."""
    if stored_shape(shape, sharding, axes) == tuple(shape):
        return x
    for axis, split in enumerate(sharding):
        if isinstance(split, Split):
            view, dim = viewed(shape, split.dim)
            inside = is_inside(x.shape, dim, view[dim], axes.bound(axis))
            zeroed = jnp.where(inside, x, jnp.zeros((), x.dtype))
            x = compat.with_weak_type(zeroed, jax.typeof(x).weak_type)
    return x


def is_inside(
    block: Sequence[int], dim: int, size: int, names: tuple[str, ...]
) -> jax.Array:
    """Mask of a local block: which of its elements along `dim` are not padding."""
    local = block[dim]
    index = lax.axis_index(names)
    rest = jnp.where(index == size // local, size % local, 0)
    count = jnp.where(index < size // local, local, rest)
    return lax.broadcasted_iota(jnp.int32, block, dim) < count
