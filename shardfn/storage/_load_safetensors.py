"""Reads tensors of others' `safetensors` files into a state, each process its part.

In: files as Hugging Face writes them, a state, and which leaf each tensor is for. Out:
the state, stored: leaf by leaf, a few shards, or a slab of one, are filled in host
memory, from the bytes of the files that belong there, and go to their devices.
"""

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from shardfn._core import compat, processes
from shardfn._core.argument_values import (
    MAPPING_OR_FUNCTION,
    PATH,
    STEP,
    TEXTS,
    check_arguments,
)
from shardfn._core.errors import call_site, names_call
from shardfn._core.leaves import Leaf, leaf_name
from shardfn._core.limits import FILLED_SHARE, READ_BYTES
from shardfn._core.memories import DEVICE, memory_of, on_device
from shardfn._core.shown_limits import SHOWN_LINES
from shardfn._core.static_leaves import close_static, open_static
from shardfn.storage._boxes import (
    Index,
    Shape,
    overlap,
    pieces,
    put_block,
    shards_here,
    size_in,
    size_of,
    within,
)
from shardfn.storage._key_words import from_words, words_of
from shardfn.storage._placement import HasStorage, stored_avals
from shardfn.storage._slabs import in_slabs
from shardfn.storage._tensor_axes import TensorPart, parts
from shardfn.storage._tensor_files import LoadError, boxes, read_box, tensors_in
from shardfn.storage._tensor_names import Names, Source, Wiring, wiring


@names_call
def load_safetensors(
    path: str | os.PathLike[str],
    state: Any,
    step: HasStorage | None = None,
    *,
    names: Names | None = None,
    allow_missing: str | Sequence[str] = (),
) -> Any:
    """Reads weights, such as those of Hugging Face, into a state as a step stores it.

    Each process reads the bytes that its devices will store, in blocks of 4 KiB, and
    holds at most a sixteenth of them, or 4 MiB, besides the shards themselves.
    Floating-point values become the leaf's dtype while they are read. With several
    processes all have to call it, and all have to see the files.

    Args:
      path: a `.safetensors` file, the `.index.json` of several, or their folder: of
        one without `model.safetensors.index.json`, all such files.
      state: the state, whole or stored, or its `ShapeDtypeStruct`s: the structure,
        shapes and dtypes of what comes back. Only leaves that no tensor is for need
        values.
      step: the sharded step that the state belongs to. Without one, the leaves are
        whole on the first device.
      names: mapping from regexes, of which the first that matches the whole name of a
        tensor counts, to leaves; or a function from a tensor's name to leaves. A leaf
        is its path in the state, such as `"params/layers/kernel"`, in which `\\1` is
        what the regex has matched. `"params/layers/kernel[\\1]"` is one index of its
        first dimension. `(path, "(h k) d -> d h k")` says how the tensor's axes become
        the leaf's; without it they are the same. A list is for several leaves, and None
        leaves the tensor out. Without `names` the tensors are called as
        `write_safetensors` calls them.
      allow_missing: path patterns of the leaves that may have no tensor, such as
        `"opt_state"`: they are those of `state`, or zeros where it has no values.

    Returns:
      The state, stored as the step stores it, or whole.

    Raises:
      LoadError: a file is damaged, or tensors and leaves do not fit; it lists all that
        does not, and where it is. Nothing is read then.
      OSError: a file is not there or cannot be read, in that process; then others raise
        `ShardingError`.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp, numpy as np, shardfn
      >>> from safetensors.numpy import save_file
      >>> from shardfn.storage.safetensors import load_safetensors
      >>> mesh = jax.make_mesh((8,), ("data",))
      >>> step = shardfn.fully_shard(lambda p, x: (p, x), mesh, min_size=0)
      >>> names = {r"h\\.(\\d)\\.up\\.weight": (r"up[\\1]", "f d -> d f")}
      >>> like = {"up": jax.ShapeDtypeStruct((2, 3, 16), jnp.float32)}
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     layers = {f"h.{i}.up.weight": np.full((16, 3), i / 2) for i in range(2)}
      ...     save_file(layers, f"{folder}/model.safetensors")
      ...     state = load_safetensors(folder, like, step, names=names)
      >>> print(state["up"].sharding.spec, state["up"][:, 0, 0])
      P(None, None, 'data') [0.  0.5]
    """
    check_arguments(
        "load_safetensors",
        path=(path, PATH),
        step=(step, STEP.or_none()),
        names=(names, MAPPING_OR_FUNCTION.or_none()),
        allow_missing=(allow_missing, TEXTS),
    )
    allowed = [allow_missing] if isinstance(allow_missing, str) else allow_missing
    group = None if step is None else processes.of(step.mesh.devices.flat)
    state = close_static(state)
    leaves, treedef, avals = stored_avals(step, state)
    arrays = jax.tree.leaves(state)
    with processes.meeting(f"checked the tensors in {path}", group):
        found = wiring(tensors_in(Path(path)), leaves, names, allowed)
        problems = [*found.problems, *_deleted(arrays, leaves, found)]
        if problems:
            raise _unfit(path, problems)
    limit = max(int(sum(map(_own_bytes, avals)) * FILLED_SHARE), READ_BYTES)
    with processes.meeting(f"read its part of {path}", group):
        for i, (leaf, aval) in enumerate(zip(leaves, avals, strict=True)):
            if not _is_given(arrays[i], leaf, found):
                arrays[i] = _read_leaf(found.of(leaf), leaf, aval, limit)
    if step is None:
        pairs = zip(arrays, avals, strict=True)
        arrays = [jax.device_put(x, aval.sharding) for x, aval in pairs]
    else:
        storage = step.storage
        named, _, _ = storage.own_leaves(state)
        pairs = zip(arrays, storage.each(named), strict=True)
        arrays = [storage.place_leaf(x, *leaf) for x, leaf in pairs]
        arrays = storage.as_leaves(arrays, leaves)
    return open_static(jax.tree.unflatten(treedef, arrays)[0])


def _is_given(x: Any, leaf: Leaf, found: Wiring) -> bool:
    """Whether the caller's state has the values of a leaf."""
    return not found.of(leaf) and not isinstance(x, jax.ShapeDtypeStruct)


def _deleted(arrays: Sequence[Any], leaves: Sequence[Leaf], found: Wiring) -> list[str]:
    return [
        f"deleted: '{leaf_name(leaf.path)}' of the state was donated to an earlier call"
        for x, leaf in zip(arrays, leaves, strict=True)
        if _is_given(x, leaf, found) and isinstance(x, jax.Array) and x.is_deleted()
    ]


def _unfit(path: str | os.PathLike[str], problems: Sequence[str]) -> LoadError:
    shown = [*problems[:SHOWN_LINES]]
    if len(problems) > SHOWN_LINES:
        shown.append(f"and {len(problems) - SHOWN_LINES} more")
    return LoadError(
        f"the tensors in {path} do not fit the state:\n    "
        + "\n    ".join(shown)
        + f"\n  load_safetensors was called at {call_site()}\n"
        "Pass names=, which says what leaf each tensor is for, and how its axes become "
        "the leaf's; None leaves it out. allow_missing= names leaves that need none."
    )


def _own_bytes(aval: jax.ShapeDtypeStruct) -> int:
    """Bytes of the shards of a leaf that this process has."""
    return sum(_shard_bytes(aval) * len(on) for _, on in shards_here(aval))


def _shard_bytes(aval: jax.ShapeDtypeStruct) -> int:
    assert aval.sharding is not None
    words = words_of(jax.ShapeDtypeStruct((), aval.dtype))
    return math.prod(aval.sharding.shard_shape(aval.shape)) * words.dtype.itemsize


def _read_leaf(
    sources: Sequence[Source], leaf: Leaf, aval: jax.ShapeDtypeStruct, limit: int
) -> jax.Array:
    """A leaf in the array that stores it, zeros where no tensor is for it."""
    sharding, words = aval.sharding, words_of(aval)
    assert sharding is not None
    shape, here, shards = words_of(leaf.aval).shape, shards_here(words), []

    def filled(indices: Sequence[Index]) -> list[np.ndarray]:
        return _filled(sources, shape, words, indices)

    together = limit // max(_shard_bytes(aval), 1)
    if not together and memory_of(sharding) == DEVICE:
        for index, devices in here:
            shards += in_slabs(words, index, devices, limit, filled)
    else:
        together = max(together, 1)
        for start in range(0, len(here), together):
            part = here[start : start + together]
            blocks = filled([index for index, _ in part])
            for block, (_, devices) in zip(blocks, part, strict=True):
                shards += put_block(block, sharding, devices)
            jax.block_until_ready(shards)  # the blocks are free when they are copied
    x = jax.make_array_from_single_device_arrays(words.shape, sharding, shards)
    x = from_words(x, aval.dtype)
    return on_device(_weak, x) if leaf.aval.weak_type else x


def _weak(x: jax.Array) -> jax.Array:
    return compat.with_weak_type(x, True)


def _filled(
    sources: Sequence[Source],
    shape: Shape,
    words: jax.ShapeDtypeStruct,
    indices: Sequence[Index],
) -> list[np.ndarray]:
    """Some boxes of the array that stores a leaf of `shape`."""
    sizes = [size_in(index, words.shape) for index in indices]
    blocks = [np.zeros(size, words.dtype) for size in sizes]
    places = [
        (piece.box, block[(*piece.source, ...)].reshape(piece.shape))
        for block, index in zip(blocks, indices, strict=True)
        for piece in pieces(shape, words.shape, index)
    ]
    for source in sources:
        _fill(source, places)
    return blocks


def _fill(source: Source, places: Sequence[tuple[Index, np.ndarray]]) -> None:
    """Reads what of a tensor belongs in some boxes of its leaf."""
    found = [part for place in places for part in _parts_in(source, *place)]
    shape = tuple(source.sizes[axis] for axis in source.how.in_tensor)
    with source.tensor.file.open("rb", buffering=0) as opened:
        for region in _regions(found):
            for box in boxes(shape, region, source.tensor.dtype.itemsize):
                values = read_box(opened, source.tensor, shape, box)
                for part in found:
                    if (common := overlap(part.box, box)) is not None:
                        into = part.into[(*within(common, part.box), ...)]
                        into[...] = values[within(common, box)]


def _parts_in(source: Source, box: Index, into: np.ndarray) -> Iterator[TensorPart]:
    """The parts of a tensor in one box of its leaf."""
    depth = len(source.at)
    lead = list(zip(source.at, box[:depth], strict=True))
    if all(rows.start <= i < rows.stop for i, rows in lead):
        at = tuple(i - rows.start for i, rows in lead)
        yield from parts(source.how, source.sizes, box[depth:], into[(*at, ...)])


def _regions(found: Sequence[TensorPart]) -> list[Index]:
    """The boxes of a tensor that are read: one around all parts, if these fill it."""
    if not found:
        return []
    around = tuple(
        slice(min(s.start for s in rows), max(s.stop for s in rows))
        for rows in zip(*(part.box for part in found), strict=True)
    )
    if size_of(around) == sum(size_of(part.box) for part in found):
        return [around]
    return [part.box for part in found]
