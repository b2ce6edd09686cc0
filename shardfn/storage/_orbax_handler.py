"""How Orbax writes and reads leaves, also those stored padded or flattened.

In: stored arrays, and the shapes of their leaves. Out: arrays of the leaves' own shapes
on disk, which any reader of Orbax checkpoints understands; and back. Every process
writes and reads only what its devices hold. Each chunk ends in a checksum, with which
whoever reads it compares it.
"""

import asyncio
import contextlib
import copy
import functools
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals, Future

from shardfn._core import processes
from shardfn._core.limits import CHUNK_BYTES, LEAVES_WRITTEN, SLABS_READ
from shardfn.storage._boxes import Index, Shape, pieces, put_block, shards_here
from shardfn.storage._padded_leaves import OnDevices, OnHost, copied
from shardfn.storage._residual_rows import added_up

CHECKSUM = [
    {"name": "bytes", "configuration": {"endian": "little"}},
    {"name": "crc32c"},
]
"""How zarr3 writes a chunk: as it is, and its checksum behind it."""

CONTEXT = ts.Context(
    {"file_io_concurrency": {"limit": 8}, "data_copy_concurrency": {"limit": 4}}
)
"""Threads that read: each holds a part of a chunk in memory of its own."""


@dataclass
class StoredRestoreArgs(ocp.RestoreArgs):
    """What is to be read into a stored array: the leaf of `shape` into `stored`."""

    restore_type: Any = OnDevices
    name: str = ""
    shape: Shape = ()
    stored: jax.ShapeDtypeStruct | None = None


class LeafHandler(ocp.type_handlers.NumpyHandler):
    """Reads and writes leaves as arrays of their own shapes."""

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Any = None
    ) -> Sequence[Future]:
        del args
        found = [copied(leaf) for leaf in values]
        return [
            CommitFutureAwaitingContractedSignals(_write(found, infos), name="leaves")
        ]

    async def deserialize(
        self, infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        assert args is not None
        read = []
        for spec, arg in zip(_read_specs(infos), args, strict=True):
            with _of_leaf(arg.name):
                read.append(await _read(spec, arg.shape, arg.stored))
        return read

    async def metadata(
        self, infos: Sequence[Any]
    ) -> Sequence[ocp.metadata.ArrayMetadata]:
        return await _metadata(infos)


@contextlib.contextmanager
def _of_leaf(name: str) -> Iterator[None]:
    """Names the leaf in what TensorStore says of its files."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"leaf '{name}': {error}") from error


async def _all(tasks: Iterable[Awaitable[Any]]) -> list[Any]:
    """Waits for all, also if one fails: TensorStore goes on with the others."""
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


async def _metadata(infos: Sequence[Any]) -> list[ocp.metadata.ArrayMetadata]:
    """Shapes and dtypes. Orbax's own handlers also turn each array's spec to JSON,
    which leaks 2 kB of host memory per array (see docs/language_model.md)."""

    async def opened(info: Any, spec: ts.Spec) -> ts.TensorStore:
        with _of_leaf(info.name):
            return await ts.open(spec, open=True, context=CONTEXT)

    specs = _read_specs(infos)
    opening = [opened(info, s) for info, s in zip(infos, specs, strict=True)]
    return [
        ocp.metadata.ArrayMetadata(
            name=info.name,
            directory=info.parent_dir,
            shape=array.shape,
            dtype=array.dtype.numpy_dtype,
            sharding=None,
        )
        for info, array in zip(infos, await _all(opening), strict=True)
    ]


def _read_specs(infos: Sequence[Any]) -> Iterator[ts.Spec]:
    """Where arrays of one directory are: they differ in their names only."""
    spec = ocp.type_handlers.get_json_tspec_read(infos[0], use_ocdbt=True)
    spec["kvstore"].pop("cache_pool", None)  # named in Orbax's context, not in ours
    for info in infos:
        spec["kvstore"]["path"] = info.name
        yield ts.Spec(spec)


async def _write(leaves: Sequence[OnHost], infos: Sequence[Any]) -> None:
    """Writes leaves from memory that is there already."""
    for info in infos:
        await info.await_path_creation()
    limit = asyncio.Semaphore(LEAVES_WRITTEN)
    both = zip(leaves, infos, strict=True)
    await _all(_write_leaf(leaf, info, limit) for leaf, info in both)


async def _write_leaf(leaf: OnHost, info: Any, limit: asyncio.Semaphore) -> None:
    async with limit:
        spec = ts.Spec(_write_spec(leaf, info))
        # One process writes the array's metadata; the others know it from `spec`.
        if leaf.is_first:
            await ts.open(spec, create=True, open=True, context=info.ts_context)
        array = await ts.open(
            spec, open=True, assume_metadata=True, context=info.ts_context
        )
        await _all(
            array[box].write(values, can_reference_source_data_indefinitely=True)
            for box, values in leaf.boxes
        )


def _write_spec(leaf: OnHost, info: Any) -> dict[str, Any]:
    """Orbax's own spec, but for the codecs."""
    spec = ocp.type_handlers.get_json_tspec_write(
        info,
        use_ocdbt=True,
        global_shape=leaf.shape,
        local_shape=leaf.chunk,
        dtype=leaf.dtype,
        **processes.own_directory(),
        arg=ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES),
    )
    spec["metadata"]["codecs"] = CHECKSUM
    return spec


async def _read(spec: ts.Spec, shape: Shape, stored: jax.ShapeDtypeStruct) -> jax.Array:
    """Reads a leaf into the shards of this process, one after the other."""
    sharding = stored.sharding
    assert sharding is not None
    array = await ts.open(spec, open=True, context=CONTEXT)
    shards = []
    for index, devices in shards_here(stored):
        if array.shape == tuple(shape):
            block = await _block(array, shape, stored, index)
        else:
            part = functools.partial(_block, stored=stored, index=index)
            block = await added_up(array, shape, part)
        shards += put_block(block, sharding, devices)
        jax.block_until_ready(shards)  # `block` is free when it has been copied
    return jax.make_array_from_single_device_arrays(stored.shape, sharding, shards)


async def _block(
    array: ts.TensorStore, shape: Shape, stored: jax.ShapeDtypeStruct, index: Index
) -> np.ndarray:
    """One shard in host memory: its part of the leaf, and zeros where that ends."""
    assert stored.sharding is not None
    block = np.zeros(stored.sharding.shard_shape(stored.shape), stored.dtype)
    limit = asyncio.Semaphore(SLABS_READ)

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
    await _all(reads)
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
    """Orbax's own type handlers, but for metadata of arrays, and the one for leaves."""
    known = ocp.type_handlers
    handlers = {t: known.get_type_handler(t) for t in known.supported_types()}
    for kind in (jax.Array, np.ndarray):
        handlers[kind] = copy.copy(handlers[kind])
        handlers[kind].metadata = _metadata
    return known.create_type_handler_registry(
        *handlers.items(), (OnDevices, LeafHandler())
    )
