"""Leaves, also those stored padded or flattened, as boxes of their own shapes.

In: stored arrays, and the shapes of their leaves. Out: the boxes of each leaf that this
process writes, copied to host memory; shards of flattened leaves first send less than
an eighth of their elements to a neighbour, so that every chunk on disk has one writer.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from shardfn._core import processes
from shardfn.storage._boxes import (
    Chunks,
    Index,
    Shape,
    ShardPiece,
    chunks_of,
    pieces,
    runs,
)


@dataclass(eq=False, slots=True)
class OnDevices:
    """A leaf that is to be written.

    Attributes:
      array: the stored array, which may have another shape than the leaf.
      shape: shape of the leaf.
      chunks: how it is cut on disk, if it is stored flattened.
      halo: per shard, the first elements of the next one; None if none are needed.
      replica: which of the copies of each shard is written.
    """

    array: jax.Array
    shape: Shape
    chunks: Chunks | None = None
    halo: jax.Array | None = None
    replica: int = 0


def on_devices(arrays: Sequence[jax.Array], shapes: Sequence[Shape]) -> list[OnDevices]:
    """Makes stored arrays ready to be written; all processes call it together.

    Args:
      arrays: stored arrays.
      shapes: the leaves' shapes.

    Returns:
      One leaf per array. Shards of flattened leaves send fewer than an eighth of their
      elements to their neighbour.
    """
    found = [
        OnDevices(x, shape, _chunks(x, shape), replica=i % _copies(x))
        for i, (x, shape) in enumerate(zip(arrays, shapes, strict=True))
    ]
    for leaf in found:
        if leaf.chunks is not None:
            leaf.halo = _halo(leaf.array, leaf.chunks)
    return found


def _copies(x: jax.Array) -> int:
    """How many devices store each shard: leaf by leaf another one of them writes, so
    that with several processes each writes about as much."""
    sizes = zip(x.shape, x.sharding.shard_shape(x.shape), strict=True)
    return len(x.sharding.device_set) // math.prod(n // part for n, part in sizes)


def _chunks(x: jax.Array, shape: Shape) -> Chunks | None:
    if x.ndim == len(shape):
        return None
    return chunks_of(shape, x.shape, x.shape[-1] // x.sharding.shard_shape(x.shape)[-1])


def _halo(x: jax.Array, chunks: Chunks) -> jax.Array | None:
    count = chunks.halo(x.shape[-1] // chunks.block)
    if not count:
        return None
    assert isinstance(x.sharding, NamedSharding)
    return _neighbour(x.sharding, count)(x)


@functools.cache
def _neighbour(sharding: NamedSharding, count: int) -> Callable[[jax.Array], jax.Array]:
    """A program that gives every shard the first `count` elements of the next one."""
    mesh, spec = sharding.mesh, sharding.spec
    name = spec[-1]

    def local(x: jax.Array) -> jax.Array:
        size = lax.axis_size(name)
        back = [(i, (i - 1) % size) for i in range(size)]
        return lax.ppermute(x[..., :count], name, back)

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))


@dataclass(frozen=True, slots=True)
class OnHost:
    """A leaf whose values this process has copied to write them.

    Attributes:
      shape: shape of the leaf.
      dtype: its dtype.
      chunk: shape of its chunks on disk.
      boxes: where the values lie in the leaf, and the values.
      is_first: whether this process is the first of those that the leaf is on, which
        also writes what the array is.
    """

    shape: Shape
    dtype: Any
    chunk: Shape
    boxes: tuple[tuple[Index, np.ndarray], ...]
    is_first: bool


def copied(leaf: OnDevices) -> OnHost:
    """The boxes that this process writes."""
    x = leaf.array
    shards = [s for s in x.addressable_shards if s.replica_id == leaf.replica]
    halos = (
        {}
        if leaf.halo is None
        else {s.device: s.data for s in leaf.halo.addressable_shards}
    )
    for data in (*(s.data for s in shards), *halos.values()):
        data.copy_to_host_async()
    boxes: list[tuple[Index, np.ndarray]] = []
    for shard in shards:
        block = np.asarray(shard.data)
        halo = halos.get(shard.device)
        if leaf.chunks is None or halo is None:
            found = pieces(leaf.shape, x.shape, shard.index)
            boxes += ((p.box, block[p.source].reshape(p.shape)) for p in found)
        else:
            boxes += _whole_chunks(leaf.chunks, shard.index, block, np.asarray(halo))
    chunk = (
        x.sharding.shard_shape(x.shape) if leaf.chunks is None else leaf.chunks.chunk
    )
    chunk = tuple(max(n, 1) for n in chunk)
    is_first = processes.of(x.sharding.device_set)[0] == processes.index()
    return OnHost(leaf.shape, x.dtype, chunk, tuple(boxes), is_first)


def _whole_chunks(
    chunks: Chunks, index: Sequence[slice], block: np.ndarray, halo: np.ndarray
) -> Iterator[tuple[Index, np.ndarray]]:
    """The boxes of the chunks that begin in a shard; the last one ends in the halo."""
    tail, size = chunks.tail, math.prod(chunks.tail)
    first = min(index[-1].start or 0, size)
    stop = min(first + block.shape[-1], size)
    start, last, end = chunks.ceil(first), chunks.floor(stop), chunks.ceil(stop)
    lead = tuple(slice(0, n) for n in chunks.shape[: chunks.start])
    last = max(start, stop if end == stop else last)
    for box, a, b in runs(start, last, tail):
        piece = ShardPiece((*lead, *box), ())
        yield piece.box, block[..., a - first : b - first].reshape(piece.shape)
    if last < end:
        rest = block[..., last - first : stop - first], halo[..., : end - stop]
        joined = np.concatenate(rest, axis=-1)
        for box, a, b in runs(last, end, tail):
            piece = ShardPiece((*lead, *box), ())
            yield piece.box, joined[..., a - last : b - last].reshape(piece.shape)
