"""Where arrays live: placing states and batches on the mesh, and taking them back.

In: pytrees as users hold them. Out: arrays as stored, and whole ones again.
"""

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import (
    Mesh,
    NamedSharding,
    SingleDeviceSharding,
)

from shardfn._core import compat, processes
from shardfn._core.errors import ShardingError, called, step_name
from shardfn._core.leaves import Leaf
from shardfn._core.sharding import Sharding
from shardfn.storage._leaves import leaves_of
from shardfn.storage._mesh_context import (
    automatic,
    is_placed_on,
    moved,
    on_each,
    on_mesh_of,
    only,
)
from shardfn.storage._padding import to_stored, to_whole
from shardfn.storage._stored_array import StoredArray, stored_array
from shardfn.storage._stored_layout import StoredLayout, axes_over as axes_over


@dataclass(frozen=True, slots=True)
class Storage(StoredLayout):
    """Places states and batches on a mesh, and takes them back."""

    def on(self, mesh: Mesh) -> "Storage":
        """The same on another mesh with the same axis names."""
        axes = axes_over(mesh, self.axes.names, self.control)
        return Storage(
            automatic(mesh), mesh, axes, self.min_size, self.control, names=self.names
        )

    def place(
        self, states: tuple[Any, ...], whole: bool = False
    ) -> tuple[list[jax.Array], tuple[Leaf, ...], Any]:
        """The states' leaves as stored; those that are not stored so yet are moved.

        Args:
          states: pytrees of arrays, whole or stored.
          whole: whether leaves that are stored padded are put together instead: so
            does a step take and return them where it is traced.

        Returns:
          The stored arrays, the leaves on logical shapes, and the tree structure.

        Raises:
          ShardingError: a leaf has no values, or its buffer was donated.
        """
        leaves, treedef = self.leaves(states)
        arrays = jax.tree.leaves(states)
        for x, leaf in zip(arrays, leaves, strict=True):
            _check_values(x, leaf)
        place_leaf = self.place_whole if whole else self.place_leaf
        placed = [
            place_leaf(x, leaf, sharding)
            for x, (leaf, sharding) in zip(arrays, self.each(leaves), strict=True)
        ]
        self.note_splits(leaves, treedef)
        return placed, leaves, treedef

    def place_leaf(self, x: Any, leaf: Leaf, sharding: Sharding) -> jax.Array:
        """A leaf in the array that stores it, which may be there already."""
        aval = self.stored_aval(leaf, sharding)
        if isinstance(x, StoredArray):
            x = x.array if x.array.shape == aval.shape else x.whole()
        shape = jnp.shape(x)
        if isinstance(x, jax.Array) and shape == aval.shape:
            if x.sharding == aval.sharding:
                return x
        with on_mesh_of(x):
            if shape != aval.shape:
                x = to_stored(jnp.asarray(x), sharding, self.axes)
            # Donating the placed leaf must not take the caller's buffer.
            x = jnp.copy(x) if isinstance(x, jax.Array) else x
        return compat.put(x, aval.sharding)

    def place_whole(self, x: Any, leaf: Leaf, sharding: Sharding) -> Any:
        """A leaf for a step that is traced: a tracer, or an array on the mesh."""
        if compat.is_traced(x):
            return x
        x = x.whole() if isinstance(x, StoredArray) else x
        return compat.put(x, self.whole_aval(leaf, sharding).sharding)

    def as_leaves(self, arrays: Sequence[Any], leaves: Sequence[Leaf]) -> list[Any]:
        """Stored arrays as the leaves that they store."""
        return [
            x
            if x.shape == leaf.aval.shape
            else StoredArray(x, leaf.aval.shape, leaf.name)
            for x, leaf in zip(arrays, leaves, strict=True)
        ]

    def results_mesh(self, batch: Sequence[Any]) -> Mesh:
        """The mesh that results are handed back on, other than the state: that of the
        states, or the caller's, if arrays of the batch are on it: they mix with those.

        Args:
          batch: the leaves of the batch, as the caller gave them.
        """
        here = self.current_mesh
        if self.given == here:
            return here
        return self.given if any(is_placed_on(self.given, x) for x in batch) else here

    def moves(
        self, out: Sequence[Any], new: Collection[int], there: Mesh
    ) -> tuple[tuple[int, Mesh], ...]:
        """Which results have to be moved to another mesh, and to which.

        Args:
          out: the leaves that the step returned.
          new: which of them are the new state.
          there: the mesh of the others.
        """
        here, new = self.current_mesh, frozenset(new)
        meshes = (here if i in new else there for i in range(len(out)))
        return tuple(
            (i, mesh)
            for i, (x, mesh) in enumerate(zip(out, meshes, strict=True))
            if type(x) in compat.CONCRETE_ARRAYS and x.sharding.mesh != mesh
        )

    def whole_on(self, process: int | None, states: tuple[Any, ...]) -> Any:
        """Stored states with every leaf whole on a device of one process, or of each if
        none is named; None on others. Leaf by leaf, every device holds one whole leaf
        for a moment."""
        if process is not None and process not in range(processes.count()):
            raise ShardingError(
                f"there is no process {process!r} to put the state together on.\n"
                f"{called()}Pass one of 0 to {processes.count() - 1}."
            )
        leaves, treedef = self.leaves(states, undecided=True)
        is_here = process is None or processes.index() == process
        arrays = []
        stored = map(stored_array, jax.tree.leaves(states))
        for x, leaf in zip(stored, leaves, strict=True):
            x = on_each(x)
            if is_here:
                arrays.append(to_whole(x, leaf.aval.shape))
        return jax.tree.unflatten(treedef, arrays) if is_here else None

    def whole(self, states: tuple[Any, ...]) -> Any:
        """Stored states with every leaf whole on the first device of the mesh."""
        leaves, treedef = self.leaves(states, undecided=True)
        if any(not x.is_fully_addressable for x in _placed(states)):
            raise ShardingError(
                "the devices of the mesh belong to several processes, and none of "
                f"them holds the state.\n{called()}"
                "Pass process=0, in all of them, to put it together on that one, or "
                "save it with shardfn.storage.checkpoint, which puts nothing together."
            )
        device = SingleDeviceSharding(self.mesh.devices.flat[0])
        arrays = list(map(stored_array, jax.tree.leaves(states)))
        traced = any(map(compat.is_traced, arrays))
        with contextlib.nullcontext() if traced else jax.set_mesh(only(device)):
            arrays = [
                x
                if leaf.aval.dtype == jax.dtypes.float0
                else to_whole(moved(x, device), leaf.aval.shape)
                for x, leaf in zip(arrays, leaves, strict=True)
            ]
        return jax.tree.unflatten(treedef, arrays)

    def place_batch(
        self, batch: Any, leaves: Sequence[Leaf], shardings: Sequence[Sharding]
    ) -> list[Any]:
        """The batch's leaves on the mesh; scalars stay if they may, see `is_placed`."""
        placed = []
        for x, leaf, sharding in zip(
            jax.tree.leaves(batch), leaves, shardings, strict=True
        ):
            _check_values(x, leaf, "batch")
            named = self.named(leaf, sharding)
            x = x.whole() if isinstance(x, StoredArray) else x
            is_scalar = not leaf.aval.shape
            if compat.is_traced(x) or is_placed(x, named, is_scalar):
                placed.append(x)
            else:
                placed.append(compat.put(x, named))
        return placed


def is_placed(x: Any, sharding: NamedSharding, is_scalar: bool) -> bool:
    """Whether a jitted step takes a leaf of the batch as it is: an array on the mesh,
    or a scalar or key not committed to devices, which costs less where it is, unless
    JAX may move it to the others only where it is asked to."""
    if not isinstance(x, jax.Array):
        return is_scalar
    if x.sharding == sharding:
        return True
    return is_scalar and not x.committed and not compat.refuses_transfers()


class HasStorage(Protocol):
    """What stores states on a mesh: a `ShardedStep`."""

    @property
    def storage(self) -> Storage:
        """How its states are stored."""
        ...

    @property
    def mesh(self) -> Mesh:
        """The mesh that it was given."""
        ...


def stored_avals(
    step: HasStorage | None, state: Any
) -> tuple[Sequence[Leaf], Any, list[jax.ShapeDtypeStruct]]:
    """The leaves of a state, by their paths in it, their structure, and shapes, dtypes
    and shardings of the arrays that store them: as a step does, or whole on the first
    device."""
    if step is not None:
        storage = step.storage
        leaves, own, treedef = storage.own_leaves(state)
        return own, treedef, [storage.stored_aval(*x) for x in storage.each(leaves)]
    leaves, treedef = leaves_of((state,), "state")
    here = SingleDeviceSharding(processes.own_device())
    avals = [
        jax.ShapeDtypeStruct(
            x.aval.shape, x.aval.dtype, weak_type=x.aval.weak_type, sharding=here
        )
        for x in leaves
    ]
    return leaves, treedef, avals


def _placed(states: Any) -> list[jax.Array]:
    """The leaves that are arrays with values."""
    kinds = (*compat.CONCRETE_ARRAYS, StoredArray)
    return [x for x in jax.tree.leaves(states) if isinstance(x, kinds)]


def _check_values(x: Any, leaf: Leaf, what: str = "state") -> None:
    if isinstance(x, jax.ShapeDtypeStruct):
        hint = (
            "Make the state with step.init(init_fn, ...) or step.shard(state)"
            if what == "state"
            else "Pass arrays"
        )
        raise ShardingError(
            f"{what} leaf '{leaf.name or what}' is a ShapeDtypeStruct, which has no "
            "values.\n"
            f"{called()}"
            f"{hint}; only plan, lower and shardings take abstract values."
        )
    is_array = isinstance(x, jax.Array) and not compat.is_traced(x)
    if is_array and x.is_deleted():
        raise ShardingError(
            f"{what} leaf '{leaf.name or what}' was donated to an earlier call and is "
            "gone.\n"
            f"{called()}"
            f"Use the state that {step_name()} returned, or pass donate=False to "
            "fully_shard to keep old states."
        )
