"""How one value is sharded over the mesh axes: a frozen value, and what follows from it.

In: an array's shape and, per mesh axis, `Split`, `Unreduced` or None (replicated).
Out: the shape on one device and the PartitionSpec.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jax.sharding import PartitionSpec

FLAT = -1
"""`Split.dim` of a value that is split as one flattened dimension."""


@dataclass(frozen=True, slots=True)
class Split:
    """Each device along the axis holds one contiguous block of dimension `dim`.

    Attributes:
      dim: the dimension, or `FLAT`: the value is flattened, padded and split.
      stored: True if the split comes from the stored state, False if from the batch.
    """

    dim: int
    stored: bool = False


@dataclass(frozen=True, slots=True)
class Unreduced:
    """Each device along the axis holds one term; the value is all terms reduced by `op`."""

    op: str = "sum"


AxisSharding = Split | Unreduced | None
Sharding = tuple[AxisSharding, ...]


@dataclass(frozen=True, slots=True)
class Axes:
    """The mesh axes that are sharded over, major to minor, and their sizes in devices."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def replicated(self) -> Sharding:
        return (None,) * len(self.names)

    @property
    def stored(self) -> int:
        """Index of the axis that parameters are split over: the last, most minor one."""
        return len(self.names) - 1

    @property
    def devices(self) -> int:
        return math.prod(self.sizes)


def on_axis(sharding: Sharding, axis: int, state: AxisSharding) -> Sharding:
    """`sharding` with the state of one axis replaced."""
    return (*sharding[:axis], state, *sharding[axis + 1 :])


def axes_of(sharding: Sharding, dim: int) -> tuple[int, ...]:
    """Indices of the mesh axes that split dimension `dim`, major to minor."""
    return tuple(
        a for a, s in enumerate(sharding) if isinstance(s, Split) and s.dim == dim
    )


def parts_of(sharding: Sharding, dim: int, axes: Axes) -> int:
    """Into how many blocks dimension `dim` is split."""
    return math.prod(axes.sizes[a] for a in axes_of(sharding, dim))


def is_flat(sharding: Sharding) -> bool:
    return bool(axes_of(sharding, FLAT))


def local_shape(
    shape: Sequence[int], sharding: Sharding, axes: Axes
) -> tuple[int, ...]:
    """Shape on one device. Blocks of a dimension that does not divide are rounded up."""
    if is_flat(sharding):
        return (-(-math.prod(shape) // parts_of(sharding, FLAT, axes)),)
    return tuple(
        -(-size // parts_of(sharding, dim, axes)) for dim, size in enumerate(shape)
    )


def stored_shape(
    shape: Sequence[int], sharding: Sharding, axes: Axes
) -> tuple[int, ...]:
    """Shape of the global array, padding included, that `local_shape` blocks make up."""
    local = local_shape(shape, sharding, axes)
    if is_flat(sharding):
        return (local[0] * parts_of(sharding, FLAT, axes),)
    return tuple(
        size * parts_of(sharding, dim, axes) for dim, size in enumerate(local)
    )


def partition_spec(sharding: Sharding, axes: Axes) -> PartitionSpec:
    """The PartitionSpec of the global array. `sharding` must not be unreduced."""
    if any(isinstance(s, Unreduced) for s in sharding):
        raise ValueError(f"an unreduced value has no PartitionSpec: {sharding}")
    dims = [s.dim for s in sharding if isinstance(s, Split)]
    rank = max(dims, default=-1) + 1 if FLAT not in dims else 1
    entries: list[str | tuple[str, ...] | None] = []
    for dim in range(rank):
        names = tuple(
            axes.names[a]
            for a in axes_of(sharding, FLAT if FLAT in dims else dim)
        )
        entries.append(names[0] if len(names) == 1 else names or None)
    return PartitionSpec(*entries)


def show(sharding: Sharding, axes: Axes) -> str:
    """`data:0` split on dimension 0, `data:+` unreduced sum, `replicated` otherwise."""
    parts = []
    for name, state in zip(axes.names, sharding, strict=True):
        if isinstance(state, Split):
            parts.append(f"{name}:{'flat' if state.dim == FLAT else state.dim}")
        elif isinstance(state, Unreduced):
            parts.append(f"{name}:{'+' if state.op == 'sum' else state.op}")
    return " ".join(parts) or "replicated"
