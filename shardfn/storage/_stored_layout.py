"""How states are laid out on a mesh: what is stored of each leaf, and where.

In: pytrees as users hold them, with values or without. Out: their leaves on logical
shapes, the avals and shardings of the arrays that store them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardfn._core import compat
from shardfn._core.automatic_axes import (
    AutoSplit,
    Made,
    auto_split,
    fitting,
    full_spec,
)
from shardfn._core.control import NOTHING_ASKED, Control
from shardfn._core.device_coords import slices_of
from shardfn._core.errors import ShardingError, called
from shardfn._core.leaves import Leaf, leaf_name
from shardfn._core.memories import HOST, kind_of
from shardfn._core.offloading import OffloadChoice
from shardfn._core.sharding import Axes, Sharding, stored_shape
from shardfn._core.state_names import Argument, StateNames, StateReading
from shardfn.storage._layout import layouts
from shardfn.storage._leaves import abstract, leaves_of
from shardfn.storage._mesh_context import current_mesh
from shardfn.storage._named_trees import states_of
from shardfn.storage._padding import to_stored
from shardfn.storage._related_leaves import with_moments
from shardfn.storage._shared_variables import refuse_shared
from shardfn.storage._stored_array import whole_sharding

Shapes = tuple[tuple[int, ...], ...]
AutoSplits = tuple[AutoSplit, ...]
"""How automatic mesh axes split each leaf of a state."""


@dataclass(frozen=True, slots=True)
class StoredLayout:
    """How states are stored on a mesh.

    `mesh` is the caller's mesh, `given`, with all axes automatic: inside, the step is
    manual over its own axes and XLA's over all others.

    `splits` notes, by structure and shapes, how automatic axes split the states that it
    has stored, for tracers of such states: on a mesh without explicit axes their types
    do not say it. Only what a call costs depends on it.

    `chosen` has by name and shape the choice that a leaf was part of whose memory
    `offload` left to the first plan.

    `names` says what the leaves of a state are called.
    """

    mesh: Mesh
    given: Mesh
    axes: Axes
    min_size: int
    control: Control = NOTHING_ASKED
    splits: dict[tuple[Any, Shapes], list[AutoSplits]] = field(default_factory=dict)
    chosen: dict[tuple[str, tuple[int, ...]], OffloadChoice] = field(
        default_factory=dict
    )
    names: StateNames = field(default_factory=StateNames)

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
        spec, mesh = full_spec(sharding, auto, self.axes), self.current_mesh
        if compat.has_types(mesh):  # types name every dimension
            rank = len(stored_shape(leaf.aval.shape, sharding, self.axes))
            spec = PartitionSpec(*spec, *[None] * (rank - len(spec)))
        return NamedSharding(mesh, spec, memory_kind=kind_of(leaf.memory))

    @property
    def current_mesh(self) -> Mesh:
        """The mesh that arrays are placed on now; see `_mesh_context.home`."""
        return current_mesh(self.mesh, self.given)

    def partition(self, leaves: Sequence[Leaf]) -> tuple[Sharding, ...]:
        """The stored sharding of every leaf."""
        found = layouts(
            [leaf.path for leaf in leaves],
            [leaf.aval for leaf in leaves],
            self.axes,
            self.min_size,
            [leaf.auto for leaf in leaves],
            self.control,
            self.names.may_be,
        )
        return tuple(layout.sharding for layout in found)

    def batch_leaves(self, batch: tuple[Any, ...]) -> tuple[list[Leaf], Any]:
        """The leaves of the arguments that are not state, and their structure."""
        return leaves_of(batch, "batch", self.auto_sizes)

    def leaves(
        self, states: tuple[Any, ...], undecided: bool = False
    ) -> tuple[tuple[Leaf, ...], Any]:
        """The leaves of whole or stored states on logical shapes, and their structure;
        if `undecided`, with those on the device whose memory is to be chosen."""
        refuse_shared(states)
        leaves, treedef = leaves_of(states, "state", self.auto_sizes)
        self.names.see(states, _shapes(leaves))
        known = self.splits.get((treedef, _shapes(leaves)), [])
        leaves = _like_moments(_split_as_known(jax.tree.leaves(states), leaves, known))
        return tuple(self._in_memory(x, undecided) for x in leaves), treedef

    def states_of(
        self, tree: Any, argument: Argument | None = None, is_stored: bool = False
    ) -> tuple[Any, ...]:
        """A tree as the states that it is, whose leaves have their names in plans; if
        `is_stored`, one that the step has stored."""
        return states_of(tree, self.names, self.control, argument, is_stored)

    def own_leaves(self, tree: Any) -> tuple[tuple[Leaf, ...], tuple[Leaf, ...], Any]:
        """The leaves of a stored tree with their names in plans, and with their paths
        in the tree, as files have them; and its structure, in a tuple."""
        leaves, _ = self.leaves(self.states_of(tree, is_stored=True))
        own, treedef = leaves_of((tree,), "state")
        each = zip(leaves, own, strict=True)
        return leaves, tuple(replace(x, path=y.path) for x, y in each), treedef

    def reading_of(self, made: Made, argument: Argument | None = None) -> StateReading:
        """Which states a function makes, read without its containers."""
        shapes = [x.shape for x in made.leaves]
        given = made.treedef, made.paths, shapes, self.control, argument
        return self.names.reading(*given)

    def made_leaves(self, made: Made, undecided: bool = False) -> tuple[Leaf, ...]:
        """The leaves of a state that a function makes, as `leaves` gives them."""
        sizes = self.auto_sizes
        leaves = (
            Leaf(path, abstract(x, path, "state"), auto_split(x, x.shape, sizes))
            for path, x in zip(made.paths, made.leaves, strict=True)
        )
        each = _like_moments(list(leaves))
        return tuple(self._in_memory(leaf, undecided) for leaf in each)

    def _in_memory(self, leaf: Leaf, undecided: bool) -> Leaf:
        """A leaf of the state with the memory that stores it."""
        name, aval = leaf_name(leaf.path), leaf.aval
        asked = self.control.of(name).offload
        if asked is None or not self.may_leave(leaf):
            return leaf
        if asked != HOST and not undecided:
            choice = self.chosen.get((name, aval.shape))
            if choice is None:
                self._refuse_undecided(name, asked)
            asked = HOST if name in choice.leaves else asked
        return replace(leaf, memory=HOST) if asked == HOST else leaf

    def may_leave(self, leaf: Leaf) -> bool:
        """Whether a leaf may live on the host: it is large, and no PRNG key."""
        is_array = bool(leaf.aval.shape) and not compat.is_key(leaf.aval.dtype)
        return is_array and leaf.aval.size >= self.min_size

    def choice_of(self, leaves: Sequence[Leaf]) -> OffloadChoice | None:
        """The choice that leaves of a state were part of, if there was one."""
        keys = ((leaf_name(leaf.path), leaf.aval.shape) for leaf in leaves)
        found = (self.chosen[key] for key in keys if key in self.chosen)
        return next(found, None)

    def to_choose(self, leaves: Sequence[Leaf]) -> list[int]:
        """The positions of the leaves whose memory is to be chosen."""
        asked = [self.control.of(leaf_name(leaf.path)).offload for leaf in leaves]
        return [
            i
            for i, leaf in enumerate(leaves)
            if asked[i] not in (None, HOST) and self.may_leave(leaf)
        ]

    def _refuse_undecided(self, name: str, asked: str) -> NoReturn:
        raise ShardingError(
            f"offload={asked!r} has not chosen a memory for state leaf '{name}' yet: "
            f"what has to leave depends on what the step takes of a batch.\n{called()}"
            "Call step.plan(state, batch) first, which chooses it; shapes are enough: "
            "step.plan(step.abstract(init_fn), batch)."
        )

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

    def note_splits(self, leaves: Sequence[Leaf], treedef: Any) -> None:
        """Notes how automatic axes split a state that is stored."""
        splits = tuple(leaf.auto or () for leaf in leaves)
        known = self.splits.setdefault((treedef, _shapes(leaves)), [])
        if splits in known:
            known.remove(splits)
        known.append(splits)


def axes_over(mesh: Mesh, names: tuple[str, ...], control: Control) -> Axes:
    """The mesh axes `names` of a mesh, divided into the groups asked for."""
    has_others = len(mesh.axis_names) > len(names)
    device = mesh.devices.flat[0]
    axes = Axes(
        names,
        tuple(mesh.shape[n] for n in names),
        tuple(mesh.shape.items()),
        cannot_sum=compat.dtypes_without_sum(device.platform, has_others),
        reads_apart=compat.reads_inside_matmuls(device.platform),
        times_transfers=compat.times_transfers(device),
        fuses_producers=compat.fuses_producers(device.platform),
        lets_sums_wait=compat.lets_sums_wait(device.platform),
        indexes_memory=compat.indexes_memory(device.platform),
        sums_in_pieces=compat.sums_in_pieces(device),
        misjudges_network=compat.misjudges_network(device),
        hides_network=compat.hides_network(device) and slices_of(mesh.devices.flat) > 1,
        platform=compat.lowered_for(device.platform, device.client),
    )
    return replace(axes, groups=tuple(sorted(control.on(axes).groups)))


def _like_moments(leaves: Sequence[Leaf]) -> tuple[Leaf, ...]:
    """Leaves that do not say how automatic axes split them, split as those are that
    they are moments of."""
    autos = with_moments(
        [leaf.path for leaf in leaves],
        [leaf.aval.shape for leaf in leaves],
        [leaf.auto for leaf in leaves],
    )
    return tuple(replace(x, auto=a) for x, a in zip(leaves, autos, strict=True))


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
