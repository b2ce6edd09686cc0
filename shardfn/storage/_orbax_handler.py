"""How Orbax writes leaves that are stored padded or flattened, and reads all leaves.

In: stored arrays, and the shapes of their leaves. Out: arrays of the leaves' own shapes
on disk, which any reader of Orbax checkpoints understands; and back. Every process
writes and reads only what its devices hold.
"""

import asyncio
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals, Future

from shardfn._core import processes
from shardfn.storage._boxes import Index, Shape, pieces
from shardfn.storage._padded_leaves import OnHost, Uneven, copied

CHUNK_BYTES = 16 * 2**20
"""Largest chunk on disk: a reader that needs a part of a chunk holds all of it."""

READS = 2
"""Slabs that are read at the same time, each of a chunk or CHUNK_BYTES."""

CONTEXT = ts.Context(
    {"file_io_concurrency": {"limit": 8}, "data_copy_concurrency": {"limit": 4}}
)
"""Threads that read: each holds a part of a chunk in memory of its own."""


@dataclass
class StoredRestoreArgs(ocp.RestoreArgs):
    """What is to be read into a stored array: the leaf of `shape` into `stored`."""

    restore_type: Any = Uneven
    shape: Shape = ()
    stored: jax.ShapeDtypeStruct | None = None


class UnevenHandler(ocp.type_handlers.NumpyHandler):
    """Reads and writes `Uneven` leaves as arrays of the leaves' own shapes."""

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Any = None
    ) -> Sequence[Future]:
        del args
        found = [copied(leaf) for leaf in values]
        return [
            CommitFutureAwaitingContractedSignals(
                _write(found, infos), name="uneven_leaves"
            )
        ]

    async def deserialize(
        self, infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        assert args is not None
        return [
            await _read(spec, arg.shape, arg.stored)
            for spec, arg in zip(_read_specs(infos), args, strict=True)
        ]


async def _metadata(infos: Sequence[Any]) -> list[ocp.metadata.ArrayMetadata]:
    """Shapes and dtypes. Orbax's own handlers also turn each array's spec to JSON,
    which leaks 2 kB of host memory per array (see docs/language_model.md)."""
    opening = [ts.open(s, open=True, context=CONTEXT) for s in _read_specs(infos)]
    return [
        ocp.metadata.ArrayMetadata(
            name=info.name,
            directory=info.parent_dir,
            shape=array.shape,
            dtype=array.dtype.numpy_dtype,
            sharding=None,
        )
        for info, array in zip(infos, await asyncio.gather(*opening), strict=True)
    ]


def _read_specs(infos: Sequence[Any]) -> Iterator[ts.Spec]:
    """Where arrays of one directory are: they differ in their names only."""
    spec = ocp.type_handlers.get_json_tspec_read(infos[0], use_ocdbt=True)
    spec["kvstore"].pop("cache_pool", None)  # named in Orbax's context, not in ours
    for info in infos:
        spec["kvstore"]["path"] = info.name
        yield ts.Spec(spec)


async def _write(leaves: Sequence[OnHost], infos: Sequence[Any]) -> None:
    """Writes one leaf after the other, each from memory that is there already."""
    for leaf, info in zip(leaves, infos, strict=True):
        await info.await_path_creation()
        spec = ocp.type_handlers.get_json_tspec_write(
            info,
            use_ocdbt=True,
            global_shape=leaf.shape,
            local_shape=leaf.chunk,
            dtype=leaf.dtype,
            **processes.own_directory(),
            arg=ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES),
        )
        # One process writes the array's metadata; the others know it from `spec`.
        if processes.index() == 0:
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


async def _read(spec: ts.Spec, shape: Shape, stored: jax.ShapeDtypeStruct) -> jax.Array:
    """Reads a leaf into the shards of this process, one after the other."""
    sharding = stored.sharding
    assert sharding is not None
    array = await ts.open(spec, open=True, context=CONTEXT)
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
    """Orbax's own type handlers, but for metadata of arrays, and the one for uneven
    leaves."""
    known = ocp.type_handlers
    handlers = {t: known.get_type_handler(t) for t in known.supported_types()}
    for kind in (jax.Array, np.ndarray):
        handlers[kind] = copy.copy(handlers[kind])
        handlers[kind].metadata = _metadata
    return known.create_type_handler_registry(
        *handlers.items(), (Uneven, UnevenHandler())
    )
