"""Where arrays live: placing states and batches on the mesh, and taking them back.

In: pytrees as users hold them. Out: leaves on logical shapes, and arrays as stored.
"""

import contextlib
import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import (
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)

from shardfn._core import compat, processes
from shardfn._core.automatic_axes import AutoSplit, fitting, full_spec
from shardfn._core.control import NOTHING_ASKED, Control
from shardfn._core.errors import ShardingError, called, step_name
from shardfn._core.leaves import Leaf
from shardfn._core.sharding import Axes, Sharding, stored_shape
from shardfn.storage._layout import partition, with_moments
from shardfn.storage._leaves import leaves_of
from shardfn.storage._mesh_context import (
    automatic,
    beside,
    home,
    is_placed_on,
    moved,
    only,
)
from shardfn.storage._padding import to_stored, to_whole
from shardfn.storage._stored_array import StoredArray, stored_array, whole_sharding

Shapes = tuple[tuple[int, ...], ...]
AutoSplits = tuple[AutoSplit, ...]
"""How automatic mesh axes split each leaf of a state."""


@dataclass(frozen=True, slots=True)
class Storage:
    """How states are stored on a mesh.

    `mesh` is the caller's mesh, `given`, with all axes automatic: inside, the step is
    manual over its own axes and XLA's over all others.

    `splits` notes, by structure and shapes, how automatic axes split the states that it
    has stored, for tracers of such states: on a mesh without explicit axes their types
    do not say it. Only what a call costs depends on it.
    """

    mesh: Mesh
    given: Mesh
    axes: Axes
    min_size: int
    control: Control = NOTHING_ASKED
    splits: dict[tuple[Any, Shapes], list[AutoSplits]] = field(default_factory=dict)

    def on(self, mesh: Mesh) -> "Storage":
        """The same on another mesh with the same axis names."""
        axes = axes_over(mesh, self.axes.names, self.control)
        return Storage(automatic(mesh), mesh, axes, self.min_size, self.control)

    def abstract(self, leaves: Sequence[Leaf]) -> list[jax.ShapeDtypeStruct]:
        """The leaves as arguments without values, still split over automatic axes."""
        whole = self.axes.replicated
        return [
            jax.ShapeDtypeStruct(
                leaf.aval.shape,
                leaf.aval.dtype,
                weak_type=leaf.aval.weak_type,
                sharding=self.named(leaf, whole) if leaf.auto else None,
            )
            for leaf in leaves
        ]

    @property
    def auto_sizes(self) -> dict[str, int]:
        """The mesh axes that XLA partitions over, and their sizes."""
        own = self.axes.names
        return {name: n for name, n in self.mesh.shape.items() if name not in own}

    def named(self, leaf: Leaf, sharding: Sharding) -> NamedSharding:
        """The sharding that stores a leaf, or feeds one of the batch."""
        auto = fitting(leaf.auto or (), leaf.aval.shape, sharding, self.axes)
        spec, mesh = full_spec(sharding, auto, self.axes), self.home
        if compat.has_types(mesh):  # types name every dimension
            rank = len(stored_shape(leaf.aval.shape, sharding, self.axes))
            spec = PartitionSpec(*spec, *[None] * (rank - len(spec)))
        return NamedSharding(mesh, spec)

    @property
    def home(self) -> Mesh:
        """The mesh that arrays are placed on now; see `_mesh_context.home`."""
        return home(self.mesh, self.given)

    def partition(self, leaves: Sequence[Leaf]) -> tuple[Sharding, ...]:
        """The stored sharding of every leaf."""
        return partition(
            [leaf.path for leaf in leaves],
            [leaf.aval for leaf in leaves],
            self.axes,
            self.min_size,
            [leaf.auto for leaf in leaves],
            self.control,
        )

    def batch_leaves(self, batch: tuple[Any, ...]) -> tuple[list[Leaf], Any]:
        """The leaves of the arguments that are not state, and their structure."""
        return leaves_of(batch, "batch", self.auto_sizes)

    def leaves(self, states: tuple[Any, ...]) -> tuple[tuple[Leaf, ...], Any]:
        """The leaves of whole or stored states on logical shapes, and their
        structure."""
        leaves, treedef = leaves_of(states, "state", self.auto_sizes)
        known = self.splits.get((treedef, _shapes(leaves)), [])
        leaves = _split_as_known(jax.tree.leaves(states), leaves, known)
        autos = with_moments(
            [leaf.path for leaf in leaves],
            [leaf.aval.shape for leaf in leaves],
            [leaf.auto for leaf in leaves],
        )
        split = [replace(x, auto=a) for x, a in zip(leaves, autos, strict=True)]
        return tuple(split), treedef

    def each(self, leaves: Sequence[Leaf]) -> list[tuple[Leaf, Sharding]]:
        return list(zip(leaves, self.partition(leaves), strict=True))

    def stored_aval(self, leaf: Leaf, sharding: Sharding) -> jax.ShapeDtypeStruct:
        """Shape, dtype and sharding of the array that stores a leaf."""
        return jax.ShapeDtypeStruct(
            stored_shape(leaf.aval.shape, sharding, self.axes),
            leaf.aval.dtype,
            weak_type=leaf.aval.weak_type,
            sharding=self.named(leaf, sharding),
        )

    def whole_aval(self, leaf: Leaf, sharding: Sharding) -> jax.ShapeDtypeStruct:
        """The same of the leaf itself: split over what divides it, not padded."""
        stored = self.stored_aval(leaf, sharding)
        named, shape = stored.sharding, leaf.aval.shape
        assert isinstance(named, NamedSharding)
        return jax.ShapeDtypeStruct(
            shape,
            leaf.aval.dtype,
            weak_type=leaf.aval.weak_type,
            sharding=whole_sharding(named, stored.shape, shape),
        )

    def stored_init(
        self, init_fn: Callable[..., Any], leaves: Sequence[Leaf], whole: bool = False
    ) -> tuple[Callable[..., list[jax.Array]], list[Any], list[int]]:
        """A function that makes a state's leaves as they are stored, or whole, their
        shardings, and the bytes of each leaf when it is whole."""
        each = self.each(leaves)

        def make(*args: Any) -> list[jax.Array]:
            made = map(jnp.asarray, jax.tree.leaves(init_fn(*args)))
            if whole:
                return list(made)
            return [
                to_stored(x, s, self.axes) for x, (_, s) in zip(made, each, strict=True)
            ]

        aval = self.whole_aval if whole else self.stored_aval
        return (
            make,
            [aval(leaf, s).sharding for leaf, s in each],
            [leaf.aval.size * leaf.aval.dtype.itemsize for leaf in leaves],
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
        with beside(x):
            if shape != aval.shape:
                x = to_stored(jnp.asarray(x), sharding, self.axes)
            # Donating the placed leaf must not take the caller's buffer.
            x = jnp.copy(x) if isinstance(x, jax.Array) else x
        return jax.device_put(x, aval.sharding)

    def place_whole(self, x: Any, leaf: Leaf, sharding: Sharding) -> Any:
        """A leaf for a step that is traced: a tracer, or an array on the mesh."""
        if compat.is_traced(x):
            return x
        x = x.whole() if isinstance(x, StoredArray) else x
        return jax.device_put(x, self.whole_aval(leaf, sharding).sharding)

    def note_splits(self, leaves: Sequence[Leaf], treedef: Any) -> None:
        """Notes how automatic axes split a state that is stored."""
        splits = tuple(leaf.auto or () for leaf in leaves)
        known = self.splits.setdefault((treedef, _shapes(leaves)), [])
        if splits in known:
            known.remove(splits)
        known.append(splits)

    def as_leaves(self, arrays: Sequence[Any], leaves: Sequence[Leaf]) -> list[Any]:
        """Stored arrays as the leaves that they store."""
        return [
            x
            if x.shape == leaf.aval.shape
            else StoredArray(x, leaf.aval.shape, leaf.name)
            for x, leaf in zip(arrays, leaves, strict=True)
        ]

    def hand_back(
        self, out: Sequence[Any], new: Collection[int], batch: Sequence[Any]
    ) -> list[Any]:
        """Results on the mesh of the states, or on the caller's, if that is where the
        arrays of its batch are: they mix with those.

        Args:
          out: the leaves that the step returned.
          new: which of them are the new state.
          batch: the leaves of the batch, as the caller gave them.
        """
        here = self.home
        if self.given == self.mesh:
            return list(out)
        there = self.given if any(is_placed_on(self.given, x) for x in batch) else here
        return [
            x
            if type(x) not in compat.CONCRETE_ARRAYS or x.sharding.mesh == mesh
            else jax.device_put(x, NamedSharding(mesh, x.sharding.spec))
            for i, x in enumerate(out)
            for mesh in (here if i in new else there,)
        ]

    def whole_on(self, process: int, states: tuple[Any, ...]) -> Any:
        """Stored states with every leaf whole on a device of one process, None on
        others. Leaf by leaf, every device holds one whole leaf for a moment."""
        if process not in range(processes.count()):
            raise ShardingError(
                f"there is no process {process!r} to put the state together on.\n"
                f"{called()}Pass one of 0 to {processes.count() - 1}."
            )
        leaves, treedef = self.leaves(states)
        everywhere = functools.cache(
            lambda mesh: jax.jit(
                lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec())
            )
        )
        arrays = []
        stored = map(stored_array, jax.tree.leaves(states))
        for x, leaf in zip(stored, leaves, strict=True):
            if isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding):
                x = everywhere(x.sharding.mesh)(x).addressable_data(0)
            if processes.index() == process:
                arrays.append(to_whole(x, leaf.aval.shape))
        if processes.index() != process:
            return None
        return jax.tree.unflatten(treedef, arrays)

    def whole(self, states: tuple[Any, ...]) -> Any:
        """Stored states with every leaf whole on the first device of the mesh."""
        leaves, treedef = self.leaves(states)
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
                placed.append(jax.device_put(x, named))
        return placed


def is_placed(x: Any, sharding: NamedSharding, is_scalar: bool) -> bool:
    """Whether a jitted step takes a leaf of the batch as it is: an array on the mesh,
    or a scalar or key not committed to devices, which costs less where it is."""
    if not isinstance(x, jax.Array):
        return is_scalar
    return x.sharding == sharding or (is_scalar and not x.committed)


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


def axes_over(mesh: Mesh, names: tuple[str, ...], control: Control) -> Axes:
    """The mesh axes `names` of a mesh, the last divided into the groups asked for."""
    sizes = tuple(mesh.shape[n] for n in names)
    groups = control.on(names[-1], sizes[-1]).groups
    has_others = len(mesh.axis_names) > len(names)
    return Axes(
        names,
        sizes,
        tuple(mesh.shape.items()),
        tuple(sorted(groups)),
        compat.dtypes_without_sum(mesh.devices.flat[0].platform, has_others),
    )


def _placed(states: Any) -> list[jax.Array]:
    """The leaves that are arrays with values."""
    kinds = (*compat.CONCRETE_ARRAYS, StoredArray)
    return [x for x in jax.tree.leaves(states) if isinstance(x, kinds)]


def _split_as_known(
    arrays: Sequence[Any], leaves: list[Leaf], known: Sequence[AutoSplits]
) -> list[Leaf]:
    """Leaves with the automatic axes that their state had when it was last seen, where
    their own types do not name any: those of tracers on a mesh without explicit axes.
    """
    for autos in reversed(known):
        if all(
            leaf.auto in (None, auto) for leaf, auto in zip(leaves, autos, strict=True)
        ):
            return [
                replace(leaf, auto=auto) if compat.is_traced(x) else leaf
                for x, leaf, auto in zip(arrays, leaves, autos, strict=True)
            ]
    return leaves


def _shapes(leaves: Sequence[Leaf]) -> Shapes:
    return tuple(leaf.aval.shape for leaf in leaves)


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
