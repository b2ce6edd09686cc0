"""What a call must look like to run a compiled step at once, without looking closer.

In: the leaves of a call. Out: the arrays to run on, or None: then the long way finds
out what they are, places them, or says what is wrong with them.
"""

import functools
import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from shardfn._api.known_arrays import KnownArrays, last_states, next_call
from shardfn._api.shared_buffers import apart, apart_from, mark_seen, shard_kind
from shardfn._core import compat
from shardfn._core.call_arguments import Position, meaning_of
from shardfn._core.leaves import Leaf
from shardfn._core.limits import KINDS
from shardfn._core.new_leaves import new_arrays, new_leaves
from shardfn.storage._placement import Storage, is_placed
from shardfn.storage._stored_array import StoredArray

SCALARS = (bool, int, float, complex)
"""Python types that JAX takes for scalars."""


def types_of(batch: Sequence[Any]) -> tuple[Any, ...] | None:
    """The types that JAX takes the leaves of a batch for, or None if one has none that
    is known at once."""
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
class StoredKind:
    """What a leaf of the state looks like where it is stored.

    Attributes:
      aval: shape, dtype and sharding of the array that stores it.
      shape: shape of the leaf.
      name: its path.
    """

    aval: jax.ShapeDtypeStruct
    shape: tuple[int, ...]
    name: str

    @classmethod
    def of(cls, leaf: Leaf, aval: jax.ShapeDtypeStruct) -> "StoredKind":
        """That of a leaf which an array like `aval` stores: the same object for the
        same leaf, so that those of two calls compare at once."""
        return _kind(aval, leaf.aval.shape, leaf.name)

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


_kind = functools.lru_cache(maxsize=KINDS)(StoredKind)


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """Where the leaves of a call's arguments belong.

    Attributes:
      state: where those of the state are, in its order.
      batch: where those of the batch are.
    """

    state: tuple[slice, ...]
    batch: tuple[slice, ...]

    @classmethod
    def of(cls, tree: Any, states: Sequence[Position]) -> "Division | None":
        """The division of arguments of structure `tree`; None if a state has no
        position among them."""
        counts = [child.num_leaves for child in tree.children()]
        ends = list(itertools.accumulate(counts))
        parts = [slice(end - n, end) for n, end in zip(counts, ends, strict=True)]
        if not all(isinstance(place, int) for place in states):
            return None
        state = tuple(parts[i] for i in states if isinstance(i, int))
        return cls(state, tuple(x for i, x in enumerate(parts) if i not in states))

    def is_like(self, other: "Division") -> bool:
        """Whether another one divides in the same way; keys hold them as objects."""
        return (self.state, self.batch) == (other.state, other.batch)

    def divide(self, leaves: list[Any]) -> tuple[list[Any], list[Any]]:
        """The leaves of the state, and those of the batch."""
        return _taken(leaves, self.state), _taken(leaves, self.batch)


def _taken(leaves: list[Any], parts: Sequence[slice]) -> list[Any]:
    if len(parts) == 1:
        return leaves[parts[0]]
    return list(itertools.chain.from_iterable(leaves[part] for part in parts))


@dataclass(frozen=True, slots=True)
class Ready:
    """A call that has gone the long way once.

    Attributes:
      run: the jitted step.
      kinds: what the state's leaves look like.
      returned: how many of them come back, the first ones; the others are read only.
      padded: positions of those that are stored padded.
      batch: where each leaf of the batch belongs, and whether it is a scalar.
      rest: the structure of the batch, a `Rest`.
      donates: whether the state's buffers are given to the result.
      without_values: whether the state has leaves of type float0, which are arrays of
        NumPy's in JAX.
      moves: by the mesh that the caller's batch is on, results that are to be moved,
        and to which mesh: the same after every call.
      by_kind: the positions of the state's leaves by the kind of a shard: arrays of
        others share no buffer with them.
    """

    run: Any
    kinds: list[StoredKind]
    returned: int
    padded: tuple[int, ...]
    batch: tuple[tuple[NamedSharding, bool], ...]
    rest: Any
    donates: bool
    without_values: bool
    moves: dict[Mesh, tuple[tuple[int, Mesh], ...]] = field(default_factory=dict)
    by_kind: dict[Hashable, list[int]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for i, leaf in enumerate(self.kinds):
            kind = shard_kind(leaf.aval)
            if kind is not None:
                self.by_kind.setdefault(kind, []).append(i)

    def arrays(
        self, state: Sequence[Any]
    ) -> tuple[list[jax.Array], KnownArrays] | tuple[None, None]:
        """The arrays that store the state's leaves, if they are stored as the step
        takes them, and alive, where `jax.jit` does not see to that; and what is known
        of them."""
        found = list(state)
        for i in self.padded:
            x = found[i]
            if type(x) is not StoredArray or x.shape != self.kinds[i].shape:
                return None, None
            found[i] = x.array
        known = last_states.find(found, self.kinds)
        if known is None:
            if not all(map(StoredKind.fits, self.kinds, found)):
                return None, None
            known = KnownArrays.of(found, self.kinds)
            last_states.add(known)
        if not compat.JIT_REFUSES_DELETED and self.any_deleted(found):
            return None, None
        return found, known

    def any_deleted(self, stored: Sequence[Any]) -> bool:
        """Whether one of the state's arrays was donated or deleted."""
        if self.without_values:
            stored = [x for x in stored if type(x) in compat.CONCRETE_ARRAYS]
        return compat.any_deleted(stored)

    def apart(
        self,
        stored: list[Any],
        placed: Sequence[Any],
        known: KnownArrays | None,
    ) -> list[Any]:
        """The state's arrays, where none that is donated shares a buffer with another,
        nor with one that is read: those of the caller's that are read stay alive."""
        fixed = stored[self.returned :]
        if known is not None and known.made >= self.returned:
            # Then all `fixed` are older.
            return apart_from(placed, stored, known.call, self.by_kind)
        return apart(stored[: self.returned], [*placed, *fixed]) + fixed

    def place(self, batch: Sequence[Any]) -> list[Any] | None:
        """The batch's leaves, of the types of that call, on the mesh, if alive."""
        placed = []
        for x, (sharding, is_scalar) in zip(batch, self.batch, strict=True):
            if isinstance(x, jax.Array) and x.is_deleted():
                return None
            if is_placed(x, sharding, is_scalar):
                placed.append(x)
            else:
                placed.append(compat.put(x, sharding))
                if type(x) in compat.CONCRETE_ARRAYS:  # it may have the same buffers
                    mark_seen(placed[-1], like=x)
        return placed

    def hand_back(
        self,
        out: Any,
        storage: Storage,
        batch: Sequence[Any],
        stored: Sequence[Any],
    ) -> Any:
        """What the step returns: results on the caller's mesh, the new state's arrays
        known to the next call, and padded leaves in their own shapes.

        Args:
          out: what the jitted step returned.
          storage: how the state is stored.
          batch: the leaves of the batch, as the caller gave them.
          stored: the state's arrays, as the jitted step took them.
        """
        meaning, there = meaning_of(self.rest), storage.results_mesh(batch)
        if not self.padded and self.moves.get(there) == ():
            if self.donates:
                self.remember(new_arrays(out, meaning), stored)
            return out
        flat, tree = jax.tree.flatten(out)
        new = new_leaves(tree, meaning)
        if there not in self.moves:
            self.moves[there] = storage.moves(flat, new, there)
        for i, mesh in self.moves[there]:
            spec = flat[i].sharding.spec
            flat[i] = jax.device_put(flat[i], NamedSharding(mesh, spec))
        if self.donates:
            self.remember([flat[i] for i in new], stored)
        for i in self.padded:
            if i < self.returned:
                j, kind = new[i], self.kinds[i]
                flat[j] = StoredArray(flat[j], kind.shape, kind.name)
        if self.padded or self.moves[there]:
            return jax.tree.unflatten(tree, flat)
        return out

    def remember(self, new: Sequence[Any], stored: Sequence[Any]) -> None:
        """Makes the arrays of a new state known to the next call, with those of
        `stored` that are read only."""
        arrays = [*new, *stored[len(new) :]]
        last_states.add(KnownArrays.of(arrays, self.kinds, len(new), next_call()))
