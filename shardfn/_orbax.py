"""How Orbax writes leaves that are stored padded or flattened, and reads all leaves.

In: stored arrays, and the shapes of their leaves. Out: arrays of the leaves' own shapes
on disk, which any reader of Orbax checkpoints understands; and back. Every process
writes and reads only what its devices hold.
"""

import asyncio
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from jax import lax
from jax.sharding import NamedSharding
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals, Future

from shardfn import _processes
from shardfn._pieces import Chunks, Index, Piece, Shape, chunks_of, pieces, runs

CHUNK_BYTES = 16 * 2**20
"""Largest chunk on disk: a reader that needs a part of a chunk holds all of it."""

READS = 2
"""Slabs that are read at the same time, each of a chunk or CHUNK_BYTES."""

CONTEXT = ts.Context(
    {"file_io_concurrency": {"limit": 8}, "data_copy_concurrency": {"limit": 4}}
)
"""Threads that read: each holds a part of a chunk in memory of its own."""


@dataclass(eq=False, slots=True)
class Uneven:
    """A leaf whose stored array has another shape than the leaf.

    Attributes:
      array: the stored array.
      shape: shape of the leaf.
      chunks: how it is cut on disk, if it is stored flattened.
      halo: per shard, the first elements of the next one; None if none are needed.
    """

    array: jax.Array
    shape: Shape
    chunks: Chunks | None = None
    halo: jax.Array | None = None


@dataclass
class StoredRestoreArgs(ocp.RestoreArgs):
    """What is to be read into a stored array: the leaf of `shape` into `stored`."""

    restore_type: Any = Uneven
    shape: Shape = ()
    stored: jax.ShapeDtypeStruct | None = None


def uneven(arrays: Sequence[jax.Array], shapes: Sequence[Shape]) -> list[Uneven]:
    """Makes stored arrays ready to be written; all processes call it together.

    Args:
      arrays: stored arrays whose shapes are not their leaves'.
      shapes: the leaves' shapes.

    Returns:
      One leaf per array. Shards of flattened leaves send fewer than an eighth of their
      elements to their neighbour.
    """
    found = [
        Uneven(x, shape, _chunks(x, shape))
        for x, shape in zip(arrays, shapes, strict=True)
    ]
    for leaf in found:
        if leaf.chunks is not None:
            leaf.halo = _halo(leaf.array, leaf.chunks)
    return found


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
class _OnHost:
    """A leaf whose values this process has copied to write them."""

    shape: Shape
    dtype: Any
    chunk: Shape
    boxes: tuple[tuple[Index, np.ndarray], ...]


def _copied(leaf: Uneven) -> _OnHost:
    """The boxes that this process writes; of replicas, the first."""
    x = leaf.array
    shards = [s for s in x.addressable_shards if s.replica_id == 0]
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
    return _OnHost(leaf.shape, x.dtype, tuple(max(n, 1) for n in chunk), tuple(boxes))


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
        piece = Piece((*lead, *box), ())
        yield piece.box, block[..., a - first : b - first].reshape(piece.shape)
    if last < end:
        rest = block[..., last - first : stop - first], halo[..., : end - stop]
        joined = np.concatenate(rest, axis=-1)
        for box, a, b in runs(last, end, tail):
            piece = Piece((*lead, *box), ())
            yield piece.box, joined[..., a - last : b - last].reshape(piece.shape)


class UnevenHandler(ocp.type_handlers.NumpyHandler):
    """Reads and writes `Uneven` leaves as arrays of the leaves' own shapes."""

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Any = None
    ) -> Sequence[Future]:
        del args
        copied = [_copied(leaf) for leaf in values]
        return [
            CommitFutureAwaitingContractedSignals(
                _write(copied, infos), name="uneven_leaves"
            )
        ]

    async def deserialize(
        self, infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        assert args is not None
        return [
            await _read(info, arg.shape, arg.stored)
            for info, arg in zip(infos, args, strict=True)
        ]


async def _write(leaves: Sequence[_OnHost], infos: Sequence[Any]) -> None:
    """Writes one leaf after the other, each from memory that is there already."""
    for leaf, info in zip(leaves, infos, strict=True):
        await info.await_path_creation()
        spec = ocp.type_handlers.get_json_tspec_write(
            info,
            use_ocdbt=True,
            global_shape=leaf.shape,
            local_shape=leaf.chunk,
            dtype=leaf.dtype,
            **_processes.own_directory(),
            arg=ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES),
        )
        # One process writes the array's metadata; the others know it from `spec`.
        if _processes.index() == 0:
            await ts.open(
                ts.Spec(spec), create=True, open=True, context=info.ts_context
            )
        array = await ts.open(
            ts.Spec(spec), open=True, assume_metadata=True, context=info.ts_context
        )
        await asyncio.gather(
            *(
                array[box].write(values, can_reference_source_data_indefinitely=True)
                for box, values in leaf.boxes
            )
        )


async def _read(info: Any, shape: Shape, stored: jax.ShapeDtypeStruct) -> jax.Array:
    """Reads a leaf into the shards of this process, one after the other."""
    sharding = stored.sharding
    assert sharding is not None
    spec = ocp.type_handlers.get_json_tspec_read(info, use_ocdbt=True)
    spec["kvstore"].pop("cache_pool", None)  # named in Orbax's context, not in ours
    array = await ts.open(ts.Spec(spec), open=True, context=CONTEXT)
    here: dict[tuple[tuple[int | None, int | None], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(stored.shape).items():
        key = tuple((s.start, s.stop) for s in index or ())
        here.setdefault(key, []).append(device)
    shards = []
    for key, devices in here.items():
        index = tuple(slice(*ends) for ends in key)
        block = await _block(array, shape, stored, index)
        shards += [jax.device_put(block, device) for device in devices]
        jax.block_until_ready(shards)  # `block` is free when it has been copied
    return jax.make_array_from_single_device_arrays(stored.shape, sharding, shards)


async def _block(
    array: ts.TensorStore, shape: Shape, stored: jax.ShapeDtypeStruct, index: Index
) -> np.ndarray:
    """One shard in host memory: its part of the leaf, and zeros where that ends."""
    assert stored.sharding is not None
    block = np.zeros(stored.sharding.shard_shape(stored.shape), stored.dtype)
    limit = asyncio.Semaphore(READS)

    async def read(into: np.ndarray, box: Index) -> None:
        async with limit:
            await ts.array(into).write(array[box])

    reads = []
    for piece in pieces(shape, stored.shape, index):
        into = block[(*piece.source, ...)].reshape(piece.shape)
        assert np.shares_memory(into, block), "reshaping split a dimension: a view"
        for rows in _slabs(piece.box, array, into.nbytes):
            skip = piece.box[0].start if rows else 0
            part = tuple(slice(r.start - skip, r.stop - skip) for r in rows)
            reads.append(read(into[(*part, ...)], (*rows, *piece.box[len(rows) :])))
    await asyncio.gather(*reads)
    return block


def _slabs(box: Index, array: ts.TensorStore, nbytes: int) -> Iterator[Index]:
    """Cuts a box between rows of chunks, so that no slab is large."""
    if not box:
        yield ()
        return
    rows = box[0]
    chunk: int = array.chunk_layout.read_chunk.shape[0]  # pyright: ignore
    count = max(CHUNK_BYTES * (rows.stop - rows.start) // max(nbytes, 1) // chunk, 1)
    start = rows.start
    while start < rows.stop:
        stop = min((start // chunk + count) * chunk, rows.stop)
        yield (slice(start, stop),)
        start = stop


def registry() -> ocp.type_handlers.TypeHandlerRegistry:
    """Orbax's own type handlers and the one for uneven leaves."""
    known = ocp.type_handlers
    return known.create_type_handler_registry(
        *((t, known.get_type_handler(t)) for t in known.supported_types()),
        (Uneven, UnevenHandler()),
    )
