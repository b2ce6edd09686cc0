"""Where arrays live: placing states and batches on the mesh, and taking them back.

In: pytrees as users hold them. Out: leaves on logical shapes, and arrays as stored.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding

from shardfn import _compat
from shardfn._arguments import Leaf, leaves_of
from shardfn._errors import ShardingError, called, step_name
from shardfn._padding import logical_shape, remember, to_stored, to_whole
from shardfn._partition import partition
from shardfn._sharding import Axes, Sharding, partition_spec, stored_shape

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Storage:
    """How states are stored on a mesh.

    `mesh` is the caller's mesh, `given`, with all axes automatic. The step is manual
    over its own axes and XLA's over all others; on an explicit mesh the types of the
    caller's arrays would have to name both, also under `jax.jit`.

    `shapes` remembers the logical shapes of the padded states it has seen, by structure
    and stored shapes: a state that went through `jax.tree.map` is still recognised.
    """

    mesh: Mesh
    given: Mesh
    axes: Axes
    min_size: int
    shapes: dict[tuple[Any, Shapes], list[Shapes]] = field(default_factory=dict)

    def named(self, sharding: Sharding) -> NamedSharding:
        return NamedSharding(self.mesh, partition_spec(sharding, self.axes))

    def partition(self, leaves: Sequence[Leaf]) -> tuple[Sharding, ...]:
        """The stored sharding of every leaf."""
        return partition(
            [leaf.path for leaf in leaves],
            [leaf.aval for leaf in leaves],
            self.axes,
            self.min_size,
        )

    def leaves(self, states: tuple[Any, ...]) -> tuple[tuple[Leaf, ...], Any]:
        """The leaves of whole or stored states on logical shapes, and their
        structure."""
        leaves, treedef = leaves_of(states, "state")
        leaves = self._all_told(states, leaves, treedef)
        shapes = tuple(leaf.aval.shape for leaf in leaves)
        stored = tuple(self.stored_aval(leaf, s).shape for leaf, s in self.each(leaves))
        known = self.shapes.get((treedef, shapes), ())
        if known and not self.is_told(jax.tree.leaves(states), shapes):
            if len(known) > 1:
                raise ShardingError(
                    f"the state could be one with leaves of shapes {list(known[0])} or "
                    f"{list(known[1])}: both are stored in these arrays.\n{called()}"
                    "Make another ShardedStep with fully_shard for the other state."
                )
            return tuple(
                Leaf(leaf.path, _reshaped(leaf.aval, shape))
                for leaf, shape in zip(leaves, known[0], strict=True)
            ), treedef
        entry = self.shapes.setdefault((treedef, stored), [])
        if shapes not in entry:
            entry.append(shapes)
        return tuple(leaves), treedef

    def _all_told(
        self, states: tuple[Any, ...], leaves: list[Leaf], treedef: Any
    ) -> list[Leaf]:
        """Leaves that are told their logical shapes tell those of the traced others."""
        raw = tuple(jnp.shape(x) for x in jax.tree.leaves(states))
        shapes = tuple(leaf.aval.shape for leaf in leaves)
        known = self.shapes.get((treedef, raw), ())
        fitting = [
            k
            for k in known
            if all(x in (r, s) for x, r, s in zip(shapes, raw, k, strict=True))
        ]
        if shapes == raw or len(fitting) != 1:
            return leaves
        return [
            Leaf(leaf.path, _reshaped(leaf.aval, shape))
            for leaf, shape in zip(leaves, fitting[0], strict=True)
        ]

    def is_told(self, arrays: Sequence[Any], shapes: Shapes) -> bool:
        """Whether the arrays themselves say that `shapes` are their leaves' shapes."""
        meshes = self.mesh, self.given
        placed = (any(_is_on(m, x) for m in meshes) for x in arrays if jnp.ndim(x))
        return not all(placed) or any(logical_shape(x) is not None for x in arrays)

    def each(self, leaves: Sequence[Leaf]) -> list[tuple[Leaf, Sharding]]:
        return list(zip(leaves, self.partition(leaves), strict=True))

    def stored_aval(self, leaf: Leaf, sharding: Sharding) -> jax.ShapeDtypeStruct:
        """Shape, dtype and sharding of the array that stores a leaf."""
        return jax.ShapeDtypeStruct(
            stored_shape(leaf.aval.shape, sharding, self.axes),
            leaf.aval.dtype,
            weak_type=leaf.aval.weak_type,
            sharding=self.named(sharding),
        )

    def place(
        self, states: tuple[Any, ...]
    ) -> tuple[list[jax.Array], tuple[Leaf, ...], Any]:
        """The states' leaves as stored; those that are not stored so yet are moved.

        Args:
          states: pytrees of arrays, whole or stored.

        Returns:
          The stored arrays, the leaves on logical shapes, and the tree structure.

        Raises:
          ShardingError: a leaf has no values, or its buffer was donated.
        """
        leaves, treedef = self.leaves(states)
        arrays = jax.tree.leaves(states)
        for x, leaf in zip(arrays, leaves, strict=True):
            _check_values(x, leaf)
        placed = [
            self.place_leaf(x, leaf, sharding)
            for x, (leaf, sharding) in zip(arrays, self.each(leaves), strict=True)
        ]
        self.remember(placed, leaves, treedef)
        return placed, leaves, treedef

    def place_leaf(self, x: Any, leaf: Leaf, sharding: Sharding) -> jax.Array:
        is_traced = _compat.is_traced(x)
        named = self.named(sharding)
        is_placed = isinstance(x, jax.Array) and not is_traced and x.sharding == named
        if is_placed and x.shape == self.stored_aval(leaf, sharding).shape:
            return x
        if jnp.shape(x) == leaf.aval.shape:
            x = to_stored(jnp.asarray(x), sharding, self.axes)
        if is_traced:
            return x
        if isinstance(x, jax.Array):
            x = jnp.copy(
                x
            )  # donating the placed leaf must not take the caller's buffer
        return jax.device_put(x, named)

    def to_remember(
        self, shapes: Shapes, leaves: Sequence[Leaf], treedef: Any
    ) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Positions and logical shapes of the stored arrays that have to carry them:
        the padded ones, and all if another known state is stored in the same shapes."""
        shared = len(self.shapes.get((treedef, shapes), ())) > 1
        return tuple(
            (i, leaf.aval.shape)
            for i, (shape, leaf) in enumerate(zip(shapes, leaves, strict=True))
            if shared or shape != leaf.aval.shape
        )

    def remember(
        self, arrays: Sequence[jax.Array], leaves: Sequence[Leaf], treedef: Any
    ) -> None:
        """Notes the logical shapes of stored arrays."""
        shapes = tuple(x.shape for x in arrays)
        for i, shape in self.to_remember(shapes, leaves, treedef):
            if not _compat.is_traced(arrays[i]):
                remember(arrays[i], shape)

    def hand_back(self, out: Sequence[Any]) -> list[Any]:
        """Results on the caller's mesh, so that they mix with its own arrays."""
        if self.given == self.mesh:
            return list(out)
        return [
            x
            if _compat.is_traced(x)
            else jax.device_put(x, NamedSharding(self.given, x.sharding.spec))
            for x in out
        ]

    def whole(self, states: tuple[Any, ...]) -> Any:
        """Stored states with every leaf whole on the first device of the mesh."""
        leaves, treedef = self.leaves(states)
        device = SingleDeviceSharding(self.mesh.devices.flat[0])
        one = Mesh(self.mesh.devices.flat[:1], ("_",), axis_types=(AxisType.Auto,))
        traced = any(map(_compat.is_traced, jax.tree.leaves(states)))
        with contextlib.nullcontext() if traced else jax.set_mesh(one):
            arrays = [
                to_whole(jax.device_put(x, device), leaf.aval.shape, sharding)
                for x, (leaf, sharding) in zip(
                    jax.tree.leaves(states), self.each(leaves), strict=True
                )
            ]
        return jax.tree.unflatten(treedef, arrays)

    def place_batch(
        self, batch: Any, leaves: Sequence[Leaf], shardings: Sequence[Sharding]
    ) -> list[Any]:
        """The batch's leaves on the mesh; scalars stay as they are."""
        placed = []
        for x, leaf, sharding in zip(
            jax.tree.leaves(batch), leaves, shardings, strict=True
        ):
            _check_values(x, leaf, "batch")
            named = self.named(sharding)
            is_array = isinstance(x, jax.Array)
            stays = _compat.is_traced(x) or not leaf.aval.shape
            if stays or (is_array and x.sharding == named):
                placed.append(x)
            else:
                placed.append(jax.device_put(x, named))
        return placed


def automatic(mesh: Mesh) -> Mesh:
    """The same devices and axes, every axis left to the compiler."""
    types = (AxisType.Auto,) * len(mesh.axis_names)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=types)


def _is_on(mesh: Mesh, x: Any) -> bool:
    """Whether `x` is a tracer or an array that is placed on the mesh."""
    if isinstance(x, jax.Array) and not _compat.is_traced(x):
        return getattr(x.sharding, "mesh", None) == mesh
    return _compat.is_traced(x)


def _reshaped(
    aval: jax.ShapeDtypeStruct, shape: tuple[int, ...]
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=aval.weak_type)


def _check_values(x: Any, leaf: Leaf, what: str = "state") -> None:
    if isinstance(x, jax.ShapeDtypeStruct):
        hint = (
            "Make the state with step.init(init_fn, ...) or step.shard(state)"
            if what == "state"
            else "Pass arrays"
        )
        raise ShardingError(
            f"{what} leaf '{leaf.name}' is a ShapeDtypeStruct, which has no values.\n"
            f"{called()}"
            f"{hint}; only plan, lower and shardings take abstract values."
        )
    is_array = isinstance(x, jax.Array) and not _compat.is_traced(x)
    if is_array and x.is_deleted():
        raise ShardingError(
            f"{what} leaf '{leaf.name}' was donated to an earlier call and is gone.\n"
            f"{called()}"
            f"Use the state that {step_name()} returned, or pass donate=False to "
            "fully_shard to keep old states."
        )
