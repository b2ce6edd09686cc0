"""Tensors in `safetensors` files: what there is of them, and parts of their values.

In: a file, the index of several, or a folder. Out: every tensor's name, dtype and
shape; and boxes of a tensor in host memory, of which only the bytes in between are
read. The format: https://huggingface.co/docs/safetensors/index#format
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import jax.numpy as jnp
import numpy as np

from shardfn._core.errors import call_site
from shardfn._core.limits import BLOCK_BYTES, READ_BYTES
from shardfn.storage._boxes import Index, Shape

DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}
"""The format's name of each dtype that it has."""

READ = {name: dtype for dtype, name in DTYPES.items()}
"""The dtype of each of the format's names."""

INDEX = "model.safetensors.index.json"
"""The name of the index in a folder of Hugging Face's."""

METADATA = "__metadata__"


class LoadError(ValueError):
    """The tensors of a file cannot be read, or do not fit the state."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor on disk.

    Attributes:
      name: its name in the file.
      file: the file.
      kind: the format's name of its dtype, which may be none of `READ`.
      shape: its shape.
      start: where in the file its first byte is.
    """

    name: str
    file: Path
    kind: str
    shape: Shape
    start: int

    @property
    def dtype(self) -> np.dtype:
        return jnp.dtype(READ[self.kind])

    def __str__(self) -> str:
        sizes = ",".join(map(str, self.shape))
        return (
            f"'{self.name}' {READ.get(self.kind, self.kind)}[{sizes}] in "
            f"{self.file.name}"
        )


def tensors_in(path: Path) -> list[Tensor]:
    """Every tensor of a file, of the files that an index names, or of a folder's."""
    index = _index_in(path)
    if index is None:
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files or not files[0].is_file():
            raise FileNotFoundError(
                f"there is no safetensors file at {path}.\n"
                f"  load_safetensors was called at {call_site()}\n"
                "Pass a file, its index, or the folder that they are in."
            )
        return [tensor for file in files for tensor in _tensors(file)]
    known = _weight_map(index)
    return [
        tensor
        for file in sorted(set(known.values()))
        for tensor in _listed(index, file, known)
    ]


def _index_in(path: Path) -> Path | None:
    if path.is_dir():
        index = path / INDEX
        return index if index.is_file() else None
    return path if path.suffix == ".json" else None


def _weight_map(index: Path) -> dict[str, str]:
    """Which file each tensor is in."""
    try:
        found = json.loads(index.read_bytes())["weight_map"]
        return {str(name): str(file) for name, file in found.items()}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise _damaged(index, f"it has no 'weight_map' ({error!r})") from error


def _listed(index: Path, file: str, known: dict[str, str]) -> Iterator[Tensor]:
    """The tensors of a file that its index lists for it."""
    place = index.parent / file
    if not place.is_file():
        raise _damaged(index, f"it names {file}, which is not there")
    found = {tensor.name: tensor for tensor in _tensors(place)}
    for name in (name for name, its_file in known.items() if its_file == file):
        if name not in found:
            raise _damaged(index, f"'{name}' is not in {file}")
        yield found[name]


def _tensors(file: Path) -> list[Tensor]:
    """The tensors of one file, as its header says."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > size - 8:
            raise _damaged(file, f"a header of {length} bytes, in a file of {size}")
        text = opened.read(length)
    try:
        entries = json.loads(text)
        return [
            _tensor(file, name, entry, 8 + length, size)
            for name, entry in entries.items()
            if name != METADATA
        ]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, LoadError):
            raise
        raise _damaged(file, f"its header is no list of tensors ({error!r})") from error


def _tensor(file: Path, name: str, entry: Any, data: int, size: int) -> Tensor:
    shape = tuple(int(n) for n in entry["shape"])
    start, stop = entry["data_offsets"]
    tensor = Tensor(name, file, str(entry["dtype"]), shape, data + start)
    if tensor.kind in READ and stop - start != tensor.dtype.itemsize * math.prod(shape):
        raise _damaged(file, f"'{name}' of shape {shape} has {stop - start} bytes")
    if start < 0 or data + stop > size:
        raise _damaged(file, f"it ends before '{name}' does")
    return tensor


def _damaged(file: Path, reason: str) -> LoadError:
    return LoadError(
        f"{file} is no whole safetensors file or index: {reason}.\n"
        f"  load_safetensors was called at {call_site()}\n"
        "Download or write it again."
    )


def boxes(shape: Shape, box: Index, itemsize: int) -> Iterator[Index]:
    """The boxes in which a box of a tensor is read, in their order in the file.

    Args:
      shape: shape of the tensor.
      box: which part of it.
      itemsize: bytes of an element.

    Yields:
      Boxes of at most `READ_BYTES`, or of one run of bytes. They have no more than
      `box`, unless its runs in the file are no whole blocks of `BLOCK_BYTES`: then they
      have these.
    """
    wide = list(box)
    for dim in reversed(range(len(shape))):
        if math.prod(_sizes(box[:dim])) > 1:
            inner = math.prod(shape[dim + 1 :]) * itemsize
            wide[dim] = _whole_blocks(box[dim], shape[dim], BLOCK_BYTES // inner)
        if wide[dim] != slice(0, shape[dim]):
            break
    yield from _cut(tuple(wide), itemsize)


def _whole_blocks(rows: slice, size: int, block: int) -> slice:
    """Rows, and those around them in the same blocks of `block` rows."""
    block = max(block, 1)
    stop = -(-rows.stop // block) * block
    return slice(rows.start // block * block, min(stop, size))


def _cut(box: Index, itemsize: int) -> Iterator[Index]:
    sizes = _sizes(box)
    dim = next((d for d, n in enumerate(sizes) if n > 1), None)
    if dim is None or math.prod(sizes) * itemsize <= READ_BYTES:
        yield box
        return
    count = max(READ_BYTES // (math.prod(sizes[dim + 1 :]) * itemsize), 1)
    rows = box[dim]
    for start in range(rows.start, rows.stop, count):
        part = slice(start, min(start + count, rows.stop))
        yield from _cut((*box[:dim], part, *box[dim + 1 :]), itemsize)


def read_box(opened: BinaryIO, tensor: Tensor, shape: Shape, box: Index) -> np.ndarray:
    """A box of a tensor in host memory.

    Args:
      opened: the tensor's file, unbuffered.
      tensor: the tensor.
      shape: its shape, or another one of as many elements.
      box: which part of it.

    Returns:
      The values, in the dtype that they have on disk.

    Raises:
      OSError: the file cannot be read, or ends before the tensor does.
    """
    sizes, item = _sizes(box), tensor.dtype.itemsize
    out = np.empty(sizes, tensor.dtype)
    whole = len(shape)
    while whole > 0 and sizes[whole - 1] == shape[whole - 1]:
        whole -= 1
    lead = max(whole - 1, 0)  # a run of the file is a box of the dimensions from here
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    rows = out.reshape(math.prod(sizes[:lead]), -1).view(np.uint8)
    first = sum(s.start * n for s, n in zip(box[lead:], strides[lead:], strict=True))
    for row, at in zip(rows, np.ndindex(*sizes[:lead]), strict=True):
        starts = (s.start + i for s, i in zip(box[:lead], at, strict=True))
        outer = sum(i * n for i, n in zip(starts, strides[:lead], strict=True))
        read_into(opened, row, tensor.start + (outer + first) * item)
    return out


def read_into(opened: BinaryIO, row: np.ndarray, start: int) -> None:
    """Fills an array of bytes from a file."""
    opened.seek(start)
    left = row.data
    while len(left):
        count = opened.readinto(left)  # pyright: ignore[reportAttributeAccessIssue]
        if not count:
            raise OSError(f"{opened.name} ends at byte {opened.tell()}")
        left = left[count:]


def _sizes(box: Sequence[slice]) -> Shape:
    return tuple(s.stop - s.start for s in box)
