"""What a call must look like to run a compiled step at once, without looking closer.

In: the leaves of a call. Out: the arrays to run on, or None: then the long way finds
out what they are, places them, or says what is wrong with them.
"""

import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from shardfn._core import compat
from shardfn.storage._mesh_context import beside
from shardfn.storage._placement import is_placed
from shardfn.storage._stored_array import StoredArray

MADE = "_shardfn_made"
"""Attribute of an array that a step has made of donated ones: the `Kind` that it fits,
and the number of the call. Whatever is older shares no buffer with it."""

SEEN = "_shardfn_seen"
"""Attribute of an array of a batch: the number of a call that it was given to. It
shares no buffer with what was made later."""

NOT_MADE = (None, 0)

_calls = itertools.count(1)

SCALARS = (bool, int, float, complex)
"""Python types that JAX takes for scalars."""


def types_of(batch: Sequence[Any]) -> tuple[Any, ...] | None:
    """The types that JAX takes the leaves of a batch for, or None if one has none that
    can be told at once."""
    found: list[Any] = []
    for x in batch:
        if type(x) in compat.CONCRETE_ARRAYS:
            found.append((x.shape, x.dtype))
        elif isinstance(x, np.ndarray | np.generic):
            found.append((x.shape, jax.dtypes.canonicalize_dtype(x.dtype)))
        elif type(x) in SCALARS:
            found.append(type(x))
        else:
            return None
    return tuple(found)


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """What a leaf of the state looks like where it is stored.

    Attributes:
      aval: shape, dtype and sharding of the array that stores it.
      shape: shape of the leaf.
      name: its path.
    """

    aval: jax.ShapeDtypeStruct
    shape: tuple[int, ...]
    name: str

    @property
    def is_padded(self) -> bool:
        return self.aval.shape != self.shape

    def fits(self, x: Any) -> bool:
        """Whether `x` is an array like that which stores the leaf."""
        return (
            type(x) in compat.CONCRETE_ARRAYS
            and x.shape == self.aval.shape
            and x.dtype == self.aval.dtype
            and x.sharding == self.aval.sharding
        )


@dataclass(frozen=True, slots=True)
class Ready:
    """A call that has gone the long way once.

    Attributes:
      run: the jitted step.
      kinds: what the state's leaves look like.
      padded: positions of those that are stored padded.
      batch: where each leaf of the batch belongs, and whether it is a scalar.
      donates: whether the state's buffers are given to the result.
    """

    run: Any
    kinds: tuple[Kind, ...]
    padded: tuple[int, ...]
    batch: tuple[tuple[NamedSharding, bool], ...]
    donates: bool

    def arrays(self, state: Sequence[Any]) -> tuple[list[jax.Array], int] | None:
        """The arrays that store the state's leaves, if they are stored as the step
        wants them, and alive; and the number of the call that made the oldest, or 0."""
        found = list(state)
        for i in self.padded:
            x = found[i]
            if type(x) is not StoredArray or x.shape != self.kinds[i].shape:
                return None
            found[i] = x.array
        oldest = sys.maxsize
        for x, kind in zip(found, self.kinds, strict=True):
            made, call = getattr(x, MADE, NOT_MADE)
            if made is not kind and not kind.fits(x) or x.is_deleted():
                return None
            if call < oldest:
                oldest = call
        return found, oldest

    def place(self, batch: Sequence[Any]) -> list[Any] | None:
        """The batch's leaves, of the types of that call, on the mesh, if alive."""
        placed = []
        for x, (sharding, is_scalar) in zip(batch, self.batch, strict=True):
            if isinstance(x, jax.Array) and x.is_deleted():
                return None
            if is_placed(x, sharding, is_scalar):
                placed.append(x)
            else:
                placed.append(jax.device_put(x, sharding))
                if type(x) in compat.CONCRETE_ARRAYS:  # it may have the same buffers
                    setattr(placed[-1], SEEN, _seen(x))
        return placed

    def leaves(self, new: list[Any]) -> list[Any]:
        """The leaves of a new state, from the arrays that store them."""
        if self.donates:
            call = next(_calls)
            for x, kind in zip(new, self.kinds, strict=True):
                if type(x) in compat.CONCRETE_ARRAYS:
                    x._shardfn_made = kind, call  # MADE
        for i in self.padded:
            new[i] = StoredArray(new[i], self.kinds[i].shape, self.kinds[i].name)
        return new


def apart(state: list[Any], batch: Sequence[Any], oldest: int = 0) -> list[Any]:
    """The state's arrays, where none shares a buffer with another one or with one of
    the batch: donated twice, or donated and read, a buffer ends the process.

    Args:
      state: the arrays.
      batch: those of the batch among others.
      oldest: the number of the call that made the oldest of `state`; 0 if not all were
        made by steps. Two that were share none.

    Returns:
      The arrays, or copies of some.
    """
    given = [x for x in batch if type(x) in compat.CONCRETE_ARRAYS]
    strange = [x for x in given if getattr(x, SEEN, oldest) >= oldest]
    strange = [x for x in strange if not hasattr(x, MADE)]
    if not oldest:
        strange += [x for x in state if not hasattr(x, MADE)]
    if not strange and len({*map(id, state), *map(id, given)}) == len(state) + len(
        given
    ):
        return state
    # Of others, those are looked at whose shards have as many bytes.
    sizes = set(map(_shard_bytes, strange)) - {0}
    alike = [x for x in given if _shard_bytes(x) in sizes]
    taken = set().union(*map(_buffers, alike))
    seen, out = set(map(id, given)), []
    for x in state:
        buffers = _buffers(x) if _shard_bytes(x) in sizes else set()
        if id(x) in seen or taken & buffers:
            with beside(x):
                x = jax.numpy.copy(x)
        seen.add(id(x))
        taken |= buffers
        out.append(x)
    for x in given:
        _seen(x)
    return out


def _seen(x: jax.Array) -> int:
    """The number of the first call that an array of a batch was given to."""
    if not hasattr(x, SEEN):
        setattr(x, SEEN, next(_calls))
    return getattr(x, SEEN)


def _shard_bytes(x: Any) -> int:
    if type(x) not in compat.CONCRETE_ARRAYS:  # float0, which has no values
        return 0
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


def _buffers(x: jax.Array) -> set[Any]:
    """The buffers of an array in this process."""
    return {
        (shard.device, shard.data.unsafe_buffer_pointer())
        for shard in x.addressable_shards
    }
