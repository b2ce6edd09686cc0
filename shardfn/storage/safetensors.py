"""States to and from `safetensors` files, for use outside JAX.

In: a state as a sharded step stores it, or whole. Out: one file with every leaf under
its path, in its own shape and dtype and without padding. One leaf at a time is in host
memory, on one process. What reads others' files into a state is in `_load_safetensors`.

The library `safetensors` writes only what is in memory as a whole, so the header, which
is one JSON object, is made here. The format:
https://huggingface.co/docs/safetensors/index#format
"""

import json
import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardfn._core import compat, processes
from shardfn._core.argument_values import (
    FUNCTION,
    MAPPING,
    PATH,
    STEP,
    TEXT,
    check_arguments,
)
from shardfn._core.errors import call_site, names_call
from shardfn._core.leaves import Leaf, leaf_name
from shardfn._core.static_leaves import close_static
from shardfn.storage._boxes import Index, pieces
from shardfn.storage._leaves import is_text, leaves_of
from shardfn.storage._load_safetensors import load_safetensors as load_safetensors
from shardfn.storage._placement import HasStorage
from shardfn.storage._stored_array import stored_array
from shardfn.storage._tensor_files import DTYPES, LoadError as LoadError

__all__ = [
    "ExportError",
    "LoadError",
    "dotted",
    "load_safetensors",
    "write_safetensors",
]


class ExportError(ValueError):
    """A state cannot be written to a file of another format."""


class _Tensor(NamedTuple):
    """A leaf on its way to the file: `stored` may be padded, and is words of keys."""

    name: str
    stored: Any
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def dotted(path: str) -> str:
    """The name of a leaf in a file: its path with dots.

    Args:
      path: path of the leaf in the state, such as `"params/layer/kernel"`.

    Returns:
      The same as `"params.layer.kernel"`.
    """
    check_arguments("dotted", path=(path, TEXT))
    return path.replace("/", ".")


@names_call
def write_safetensors(
    path: str | os.PathLike[str],
    state: Any,
    step: HasStorage | None = None,
    *,
    names: Callable[[str], str | None] = dotted,
    metadata: Mapping[str, str] | None = None,
) -> list[str]:
    """Writes a state, or a part of it, to one `safetensors` file.

    The file appears when it is complete. Each leaf is put together in the memory of
    this host, written, and dropped, before the next one. With several processes all
    have to call it; process 0 writes, and each device holds one whole leaf at a time.

    Args:
      path: the file; one that is there is replaced.
      state: the state, stored or whole. PRNG keys are written as their words.
      step: the sharded step that the state belongs to, if it is stored.
      names: what a leaf is called in the file, from its path in the state, such as
        `"params/layer/kernel"`; None leaves the leaf out.
      metadata: texts to keep in the file's header.

    Returns:
      The names in the file, as they follow each other in it.

    Raises:
      ExportError: two leaves have one name, a name is none that the format has, or a
        dtype is not among `DTYPES`.
      OSError: the file cannot be written, in process 0; then others raise
        `ShardingError`.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp, shardfn
      >>> from safetensors.numpy import load_file
      >>> from shardfn.storage.safetensors import write_safetensors
      >>> mesh = jax.make_mesh((8,), ("data",))
      >>> step = shardfn.fully_shard(lambda p, x: (p, x), mesh, min_size=0)
      >>> state = step.init(lambda: {"layer": {"kernel": jnp.arange(5.0)}})
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     names = write_safetensors(f"{directory}/model", state, step)
      ...     print(names, load_file(f"{directory}/model")["layer.kernel"])
      ['layer.kernel'] [0. 1. 2. 3. 4.]
    """
    check_arguments(
        "write_safetensors",
        path=(path, PATH),
        step=(step, STEP.or_none()),
        names=(names, FUNCTION),
        metadata=(metadata, MAPPING.or_none()),
    )
    tensors = _tensors(state, step, names)
    group = None if step is None else processes.of(step.mesh.devices.flat)
    with processes.meeting(f"written its part of {path}", group):
        if processes.index() == 0:
            _write(Path(path), tensors, metadata or {})
        else:
            for tensor in tensors:
                _whole(tensor)
    return [tensor.name for tensor in tensors]


def _tensors(
    state: Any, step: HasStorage | None, names: Callable[[str], str | None]
) -> list[_Tensor]:
    """What is to be written, the widest dtypes first: then each is aligned."""
    state = close_static(state)
    if step is None:
        leaves, _ = leaves_of((state,), "state")
    else:
        leaves = step.storage.own_leaves(state)[1]
    found: dict[str, _Tensor] = {}
    for leaf, x in zip(leaves, jax.tree.leaves(state), strict=True):
        name = names(leaf_name(leaf.path))
        if name is None:
            continue
        if name == "__metadata__" or not is_text(name):
            raise ExportError(
                f"state leaf {leaf_name(leaf.path)!a} would be called {name!a} in the "
                f"file, which no reader takes.\n"
                f"  write_safetensors was called at {call_site()}\n"
                "Pass names=, a function that gives it another name, or None."
            )
        if name in found:
            raise ExportError(
                f"two leaves of the state would be called '{name}' in the file.\n"
                f"  write_safetensors was called at {call_site()}\n"
                "Pass names=, a function that gives each path a name of its own."
            )
        found[name] = _tensor(name, leaf, x)
    return sorted(found.values(), key=lambda t: (-t.dtype.itemsize, t.name))


def _tensor(name: str, leaf: Leaf, x: Any) -> _Tensor:
    shape, dtype = leaf.aval.shape, leaf.aval.dtype
    if compat.is_key(dtype):
        x = jax.random.key_data(x)
        shape, dtype = (*shape, *x.shape[len(shape) :]), x.dtype
    if dtype.name not in DTYPES:
        where = leaf_name(leaf.path)
        raise ExportError(
            f"state leaf '{where}' is {dtype.name}, which safetensors files cannot "
            f"hold.\n  write_safetensors was called at {call_site()}\n"
            "Cast it in the state, or pass names= that gives None for it."
        )
    return _Tensor(name, stored_array(x), shape, dtype)


def _header(tensors: Sequence[_Tensor], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {}
    if metadata:
        entries["__metadata__"] = {k: str(v) for k, v in metadata.items()}
    end = 0
    for t in tensors:
        start, end = end, end + t.nbytes
        entries[t.name] = {
            "dtype": DTYPES[t.dtype.name],
            "shape": t.shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write(path: Path, tensors: Sequence[_Tensor], metadata: Mapping[str, str]) -> None:
    """Writes what there is to write; after an error it still takes part in putting
    leaves together, for the other processes."""
    # No other writer has this name, and no link is there.
    partial = path.with_name(f".{secrets.token_hex(8)}.partial")
    rest = iter(tensors)
    try:
        with partial.open("xb") as file:
            file.write(_header(tensors, metadata))
            for tensor in rest:
                # Not by a name, which would keep it while the next is made.
                _whole(tensor).reshape(-1).view(np.uint8).tofile(file)
        partial.replace(path)
    except Exception:
        for tensor in rest if processes.count() > 1 else ():
            _whole(tensor)
        raise
    finally:
        partial.unlink(missing_ok=True)


def _whole(tensor: _Tensor) -> np.ndarray:
    """A leaf in host memory, without padding."""
    x, shape = tensor.stored, tensor.shape
    if not isinstance(x, jax.Array):
        return np.asarray(x, tensor.dtype, order="C")
    out = np.empty(shape, tensor.dtype)
    for block, index in _blocks(x):
        for piece in pieces(shape, x.shape, index):
            out[piece.box] = block[piece.source].reshape(piece.shape)
    return out


def _blocks(x: jax.Array) -> Iterator[tuple[np.ndarray, Index]]:
    """An array as blocks in host memory, one after the other."""
    if not x.is_fully_addressable:
        whole = x if x.is_fully_replicated else _everywhere(x)
        yield (
            np.asarray(whole.addressable_data(0)),
            tuple(slice(0, n) for n in x.shape),
        )
        return
    for shard in x.addressable_shards:
        if shard.replica_id == 0:
            # An array keeps its copy on the host: this one is dropped with it.
            yield np.asarray(jnp.copy(shard.data)), shard.index


def _everywhere(x: jax.Array) -> jax.Array:
    assert isinstance(x.sharding, NamedSharding)
    whole = NamedSharding(x.sharding.mesh, PartitionSpec())
    return jax.jit(lambda x: x, out_shardings=whole)(x)
