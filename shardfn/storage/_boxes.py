"""Which boxes of a leaf a device stores: what a checkpoint writes and reads, unpadded.

In: the shape of a leaf, the shape of the array that stores it, and the index of one
shard of that array. Out: boxes of the leaf, and where in the shard their values lie.

A leaf stored padded lies in its shards as boxes. One stored flattened (see
`_layout`) does not: a shard is a run of its elements, and begins and ends within a
row. On disk such a leaf is cut into chunks that are runs too, about an eighth of a
shard each, and whoever stores the first element of a chunk writes it; so each chunk
has one writer, who needs less than one chunk of elements from the next shard.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from shardfn._core.limits import CHUNKS_PER_SHARD

Shape = tuple[int, ...]
Index = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class ShardPiece:
    """Values that are a box of the leaf and contiguous in a shard.

    Attributes:
      box: where they are in the leaf.
      source: where they are in the shard, which may have fewer dimensions.
    """

    box: Index
    source: Index

    @property
    def shape(self) -> Shape:
        return tuple(s.stop - s.start for s in self.box)


def pieces(
    shape: Sequence[int], stored: Sequence[int], index: Sequence[slice]
) -> list[ShardPiece]:
    """The boxes of a leaf that one shard holds, padding left out.

    Args:
      shape: shape of the leaf.
      stored: shape of the array that stores it: padded, or flattened from some
        dimension on and padded.
      index: the shard's place in that array.

    Returns:
      Boxes that do not overlap; none if the shard is all padding.
    """
    start = len(stored) - 1
    if len(stored) == len(shape):
        found = [_clipped(i, size) for i, size in zip(index, shape, strict=True)]
        box = tuple(slice(i, i + n) for i, n in found)
        whole = ShardPiece(box, tuple(slice(0, n) for _, n in found))
        return [whole] if 0 not in whole.shape else []
    tail = tuple(shape[start:])
    first, count = _clipped(index[start], math.prod(tail))
    lead = [_clipped(i, n) for i, n in zip(index[:start], shape[:start], strict=True)]
    return [
        ShardPiece(
            (*(slice(i, i + n) for i, n in lead), *box),
            (*(slice(0, n) for _, n in lead), slice(a - first, b - first)),
        )
        for box, a, b in runs(first, first + count, tail)
    ]


def _clipped(index: slice, size: int) -> tuple[int, int]:
    """Begin and length of an index within `size`."""
    start, stop, _ = index.indices(max(size, index.stop or 0))
    start = min(start, size)
    return start, max(min(stop, size) - start, 0)


def shards_here(aval: jax.ShapeDtypeStruct) -> list[tuple[Index, list[Any]]]:
    """The shards of an array that this process stores, and the devices that each is
    on."""
    assert aval.sharding is not None
    here: dict[tuple[tuple[int | None, int | None], ...], list[Any]] = {}
    for device, index in aval.sharding.addressable_devices_indices_map(
        aval.shape
    ).items():
        key = tuple((s.start, s.stop) for s in index or ())
        here.setdefault(key, []).append(device)
    return [(tuple(slice(*ends) for ends in key), on) for key, on in here.items()]


def put_block(
    block: np.ndarray, sharding: Sharding, devices: Sequence[Any]
) -> list[jax.Array]:
    """A block on some of the devices of a sharding, in the memory that it names."""
    kind = sharding.memory_kind
    return [
        jax.device_put(block, SingleDeviceSharding(device, memory_kind=kind))
        for device in devices
    ]


def size_of(box: Index) -> int:
    """Elements of a box."""
    return math.prod(s.stop - s.start for s in box)


def size_in(index: Index, shape: Shape) -> Shape:
    """The shape of what an index takes of an array."""
    return tuple(len(range(*s.indices(n))) for s, n in zip(index, shape, strict=True))


def overlap(one: Index, other: Index) -> Index | None:
    """What two boxes have in common; None if that is nothing."""
    both = tuple(
        slice(max(a.start, b.start), min(a.stop, b.stop))
        for a, b in zip(one, other, strict=True)
    )
    return both if all(s.start < s.stop for s in both) else None


def within(box: Index, outer: Index) -> Index:
    """Where a box lies in an array of the values of a box around it."""
    return tuple(
        slice(s.start - o.start, s.stop - o.start)
        for s, o in zip(box, outer, strict=True)
    )


def runs(start: int, stop: int, shape: Shape) -> Iterator[tuple[Index, int, int]]:
    """A run of the elements of an array, in row-major order, as boxes.

    Args:
      start: first element.
      stop: behind the last element.
      shape: shape of the array.

    Yields:
      `(box, start, stop)` in order; at most two per dimension, less one.
    """
    if start >= stop:
        return
    if len(shape) == 1:
        yield (slice(start, stop),), start, stop
        return
    row = math.prod(shape[1:])
    whole = range(-(-start // row), stop // row)
    if start % row:
        yield from _in_row(start // row, start, min(stop, whole.start * row), shape)
    if whole:
        full = tuple(slice(0, n) for n in shape[1:])
        yield (
            (slice(whole.start, whole.stop), *full),
            whole.start * row,
            (whole.stop * row),
        )
    if stop % row and stop // row * row >= start:
        yield from _in_row(stop // row, stop // row * row, stop, shape)


def _in_row(
    row: int, start: int, stop: int, shape: Shape
) -> Iterator[tuple[Index, int, int]]:
    skip = row * math.prod(shape[1:])
    for box, a, b in runs(start - skip, stop - skip, shape[1:]):
        yield (slice(row, row + 1), *box), a + skip, b + skip


@dataclass(frozen=True, slots=True)
class Chunks:
    """How a flattened leaf is cut into chunks on disk.

    Attributes:
      shape: shape of the leaf.
      start: the dimension that it is flattened from.
      block: elements of one shard, per index before `start`.
      chunk: shape of a chunk: a run of elements in each index before `start`.
    """

    shape: Shape
    start: int
    block: int
    chunk: Shape

    @property
    def tail(self) -> Shape:
        return self.shape[self.start :]

    @property
    def run(self) -> tuple[int, int]:
        """Elements of a chunk, and of the row that is cut into such chunks."""
        chunk = self.chunk[self.start :]
        dim = next((d for d, n in enumerate(chunk) if n > 1), len(chunk) - 1)
        inner = math.prod(self.tail[dim + 1 :])
        return chunk[dim] * inner, self.tail[dim] * inner

    def ceil(self, element: int) -> int:
        """Where the first chunk begins that begins at `element` or later."""
        run, row = self.run
        whole, rest = divmod(element, row)
        return whole * row + min(-(-rest // run) * run, row)

    def floor(self, element: int) -> int:
        """Where the last chunk begins that begins at `element` or earlier."""
        run, row = self.run
        whole, rest = divmod(element, row)
        return whole * row + rest // run * run

    def halo(self, shards: int) -> int:
        """Elements that a shard needs of the next one, at most."""
        size = math.prod(self.tail)
        ends = (min((i + 1) * self.block, size) for i in range(shards))
        return max(self.ceil(end) - end for end in ends)


def chunks_of(shape: Sequence[int], stored: Sequence[int], shards: int) -> Chunks:
    """Cuts a flattened leaf into chunks.

    Args:
      shape: shape of the leaf.
      stored: shape of the array that stores it.
      shards: number of shards of its last dimension.

    Returns:
      The chunks; each is a run of at most an eighth of a shard.
    """
    shape, start = tuple(shape), len(stored) - 1
    block = stored[-1] // shards
    limit = max(block // CHUNKS_PER_SHARD, 1)
    chunk = [1] * len(shape)
    for dim in range(len(shape) - 1, start - 1, -1):
        inner = math.prod(shape[dim + 1 :])
        chunk[dim] = min(shape[dim], max(limit // inner, 1))
        if chunk[dim] < shape[dim]:
            break
    return Chunks(shape, start, block, (*shape[:start], *chunk[start:]))
