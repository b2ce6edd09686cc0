"""How one value is sharded over the mesh axes: a frozen value, and what follows from
it.

In: an array's shape and, per mesh axis, `Split`, `Unreduced` or None (replicated).
Out: the shape on one device and the PartitionSpec.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from jax.sharding import PartitionSpec

from shardfn._core.axis_kinds import AxisKind, default_kinds


def flat(start: int) -> int:
    """`Split.dim` of a value whose dimensions from `start` on are split as one."""
    return -1 - start


def flat_start(dim: int) -> int | None:
    """Inverse of `flat`; None for an ordinary dimension."""
    return -1 - dim if dim < 0 else None


@dataclass(frozen=True, slots=True)
class Split:
    """Each device along the axis holds one contiguous block of dimension `dim`.

    Attributes:
      dim: the dimension, or `flat(start)`: the dimensions from `start` on are flattened
        into one, which is padded and split.
      stored: True if the split comes from the stored state, False if from the batch.
      group: 0, or: every group of so many neighbours along the axis holds the value.
      shift: the block begins so many rows before the device's own, around the ends.
      runs: 0, or: the dimension is so many equal runs, such as microbatches, and each
        device holds its block of every run.
      stationary: True if the split comes from a leaf of the state that stays where it
        is: what meets it moves.
      moved: True if rows of the batch are split otherwise than they came in, such as by
        parts of each row: what meets rows that are as they came in is moved to them.
    """

    dim: int
    stored: bool = False
    group: int = 0
    shift: int = 0
    runs: int = 0
    stationary: bool = False
    moved: bool = False

    @property
    def origin(self) -> tuple[bool, bool]:
        """What orders splits: of the batch before the state, and of rows as they came
        in before others."""
        return self.stored, self.moved


@dataclass(frozen=True, slots=True)
class Unreduced:
    """Each device along the axis holds one term; the value is all terms reduced by
    `op`."""

    op: str = "sum"


AxisSharding = Split | Unreduced | None
Sharding = tuple[AxisSharding, ...]


@dataclass(frozen=True, slots=True)
class Axes:
    """The mesh axes that are sharded over, major to minor, and their sizes in devices.

    `mesh` is all axes of the mesh and their sizes, in its order; empty if not known.
    `groups` are the sizes of groups of neighbours along one axis, each dividing the
    next, within which values may be split; `shard_map` then binds parts of it.
    `cannot_sum` names the dtypes that the compiler cannot sum over these devices.
    `reads_apart` says that each use of a quantized value should read the bytes itself.
    `times_transfers` says that the compiler delays sums of loops, and schedules
    transfers by how long they take; `misjudges_network`, that it takes them for longer;
    `profiled`, that it is given how long each takes.
    `fuses_producers` says that the compiler makes an operand inside of the product that
    reads it, as TPUs' does.
    `lets_sums_wait` says that it puts off sums of unrolled layers.
    `indexes_memory` says that it writes an array to memory before it is indexed.
    `sums_in_pieces` says that on large slices it all-reduces rows that it cannot cut.
    `hides_network` says that what a loop sends between hosts can take as long as what
    it computes, if it computes `limits.SUMS_FLOPS` for each byte.
    `kinds` are what the axes are for: the default ones, if none are given.
    `platform` is what lowering calls that of the devices; "" if not known.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    mesh: tuple[tuple[str, int], ...] = ()
    groups: tuple[int, ...] = ()
    cannot_sum: tuple[str, ...] = ()
    reads_apart: bool = field(default=False, compare=False, repr=False)
    times_transfers: bool = field(default=True, repr=False)
    misjudges_network: bool = field(default=False, repr=False)
    hides_network: bool = field(default=False, repr=False)
    profiled: bool = field(default=False, repr=False)
    fuses_producers: bool = field(default=False, repr=False)
    lets_sums_wait: bool = field(default=False, repr=False)
    indexes_memory: bool = field(default=False, repr=False)
    sums_in_pieces: bool = field(default=False, repr=False)
    kinds: tuple[AxisKind, ...] = field(default=(), repr=False)
    platform: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if not self.kinds:
            object.__setattr__(self, "kinds", default_kinds(len(self.names)))

    @property
    def replicated(self) -> Sharding:
        return (None,) * len(self.names)

    @property
    def stored(self) -> int:
        """Index of the axis that leaves of the state are split over by themselves."""
        return next(a for a, kind in enumerate(self.kinds) if kind.stores)

    @property
    def divided(self) -> int:
        """Index of the axis that `groups` divide."""
        return next(a for a, kind in enumerate(self.kinds) if kind.divides)

    @property
    def batch(self) -> tuple[str, ...]:
        """The axes that rows of the batch are split over by themselves."""
        pairs = zip(self.names, self.kinds, strict=True)
        return tuple(name for name, kind in pairs if kind.batch)

    def named(self, which: Iterable[int]) -> str:
        """The names of some axes, for people: `replica,data`."""
        return ",".join(self.names[axis] for axis in which)

    @property
    def devices(self) -> int:
        return math.prod(self.sizes)

    def size(self, name: str) -> int:
        """The devices along an axis; one if it is none of these."""
        return dict(zip(self.names, self.sizes, strict=True)).get(name, 1)

    @property
    def parts(self) -> tuple[int, ...]:
        """Sizes of the parts of the divided axis, major to minor."""
        edges = (1, *self.groups, self.sizes[self.divided])
        return tuple(b // a for a, b in reversed([*itertools.pairwise(edges)]))

    def bound(self, axis: int, group: int = 0) -> tuple[str, ...]:
        """The names that `shard_map` binds for an axis, or for a group along it: none
        of the mesh's where it is divided."""
        name = self.names[axis]
        if not self.groups or axis != self.divided:
            return (name,)
        stem, known = f"{name}__", (*self.names, *(n for n, _ in self.mesh))
        while any(other.startswith(stem) for other in known):
            stem += "_"
        parts = [f"{stem}{i}" for i in range(len(self.parts))]
        at = self.groups.index(group) if group else len(parts) - 1
        return tuple(parts[len(parts) - 1 - at :])


def without_origin(sharding: Sharding) -> Sharding:
    """`sharding` without the notes where a split comes from."""
    return tuple(
        replace(s, stored=False, group=0, stationary=False, moved=False)
        if isinstance(s, Split)
        else s
        for s in sharding
    )


def plain(split: Split) -> Split:
    """The same split in blocks as they lie: neither shifted nor of several runs."""
    return replace(split, shift=0, runs=0) if split.shift or split.runs else split


def of_dim(split: Split, dim: int) -> Split:
    """A split of another dimension, from the same origin."""
    return Split(dim, split.stored, stationary=split.stationary, moved=split.moved)


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
    return math.prod(along(sharding, a, axes) for a in axes_of(sharding, dim))


def along(sharding: Sharding, axis: int, axes: Axes) -> int:
    """How many devices along an axis share one value."""
    state = sharding[axis]
    group = state.group if isinstance(state, Split) else 0
    return group or axes.sizes[axis]


def is_flat(sharding: Sharding) -> bool:
    return any(isinstance(s, Split) and s.dim < 0 for s in sharding)


def viewed(shape: Sequence[int], dim: int) -> tuple[tuple[int, ...], int]:
    """The shape that `dim` is a dimension of, flattened if need be, and which it is."""
    start = flat_start(dim)
    if start is None:
        return tuple(shape), dim
    return (*shape[:start], math.prod(shape[start:])), start


def is_unreduced(sharding: Sharding) -> bool:
    """Whether each device has a term of the value, along some axis."""
    return any(isinstance(state, Unreduced) for state in sharding)


def local_shape(
    shape: Sequence[int], sharding: Sharding, axes: Axes
) -> tuple[int, ...]:
    """Shape on one device. Blocks of a dimension that does not divide are rounded
    up."""
    out = list(shape)
    for dim in {s.dim for s in sharding if isinstance(s, Split)}:
        view, at = viewed(out, dim)
        out = list(view)
        out[at] = -(-out[at] // parts_of(sharding, dim, axes))
    return tuple(out)


def stored_shape(
    shape: Sequence[int], sharding: Sharding, axes: Axes
) -> tuple[int, ...]:
    """Shape of the global array, padding included, that `local_shape` blocks make
    up."""
    out = list(local_shape(shape, sharding, axes))
    for dim in {s.dim for s in sharding if isinstance(s, Split)}:
        start = flat_start(dim)
        out[dim if start is None else start] *= parts_of(sharding, dim, axes)
    return tuple(out)


def partition_spec(sharding: Sharding, axes: Axes) -> PartitionSpec:
    """The PartitionSpec of the global array. `sharding` must not be unreduced."""
    if is_unreduced(sharding):
        raise ValueError(f"an unreduced value has no PartitionSpec: {sharding}")
    dims = {
        s.dim if (start := flat_start(s.dim)) is None else start: s.dim
        for s in sharding
        if isinstance(s, Split)
    }
    entries: list[str | tuple[str, ...] | None] = []
    for at in range(max(dims, default=-1) + 1):
        over = axes_of(sharding, dims[at]) if at in dims else ()
        names = tuple(axes.names[a] for a in over)
        entries.append(names[0] if len(names) == 1 else names or None)
    return PartitionSpec(*entries)


def names_in(entry: object) -> tuple[str, ...]:
    """The mesh axes of one entry of a PartitionSpec."""
    if isinstance(entry, tuple):
        return entry
    return (entry,) if isinstance(entry, str) else ()


def named_twice(spec: Iterable[object]) -> str | None:
    """A mesh axis that a PartitionSpec names more than once; None if none is."""
    names = [name for entry in spec for name in names_in(entry)]
    return next((name for name in names if names.count(name) > 1), None)


def in_order(names: Sequence[str], axes: Axes) -> tuple[str, ...]:
    """Mesh axes in the order of the step's, major to minor."""
    return tuple(sorted(names, key=axes.names.index))


def show(sharding: Sharding, axes: Axes) -> str:
    """`data:0` split on dimension 0, `data:0*` on 0 and all after it flattened,
    `data:+` an unreduced sum, else `replicated`."""
    parts = []
    for name, state in zip(axes.names, sharding, strict=True):
        if isinstance(state, Split):
            start = flat_start(state.dim)
            parts.append(f"{name}:{state.dim if start is None else f'{start}*'}")
        elif isinstance(state, Unreduced):
            parts.append(f"{name}:{'+' if state.op == 'sum' else state.op}")
    return " ".join(parts) or "replicated"
