"""Which dimension of each state leaf is stored split.

In: shapes, dtypes and tree paths of a state, and how automatic mesh axes split it. Out:
one `Sharding` per leaf. The choice looks at nothing else, so `init`, `shardings`,
checkpoints and the step always agree, and an optimizer moment is split like its
parameter.
"""

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardfn._core import compat
from shardfn._core.automatic_axes import AutoSplit
from shardfn._core.control import NOTHING_ASKED, Control, axis_of
from shardfn._core.errors import ShardingError, called
from shardfn._core.leaves import leaf_name
from shardfn._core.limits import FEATURE_ELEMENTS, PADDING_SHARE
from shardfn._core.named_states import lies_in_part
from shardfn._core.option_values import StoredAxis, shown_axes
from shardfn._core.residual import axis_of_terms
from shardfn._core.sharding import (
    Axes,
    Sharding,
    Split,
    flat,
    is_flat,
    of_dim,
    on_axis,
)
from shardfn._core.tile_limits import TPU_TILE
from shardfn.storage._leaves import leaves_of
from shardfn.storage._related_leaves import stacked_leaves

Why = tuple[str, tuple[Any, ...]]
"""A reason: text in which `{}` stands for each of the numbers that follow."""


class Layout(NamedTuple):
    """How a leaf is stored, and why."""

    sharding: Sharding
    why: tuple[Why, ...]


OWN: tuple[Why, ...] = (("per_device_state: each device keeps its own", ()),)
ROWS: tuple[Why, ...] = (("a row of terms for each device that sums them", ()),)
FILLING = (
    "{} devices divide dimension {} of {}, in parts that fill TPU tiles "
    "(limits.TPU_TILE)"
)
FIRST = (
    FILLING + f"; of several that do it is the first of at least {FEATURE_ELEMENTS} "
    "(limits.FEATURE_ELEMENTS)"
)
LARGEST = (
    FILLING + f"; of several that do, all below {FEATURE_ELEMENTS} "
    "(limits.FEATURE_ELEMENTS), it is the largest"
)
DIVISIBLE = "{} devices divide dimension {} of {}"
PADDED = (
    "no dimension divides by {}; of padding dimension {} of {} is the least, and at "
    f"most {PADDING_SHARE:.0%} (limits.PADDING_SHARE)"
)
FLATTENED = (
    "no dimension divides by {}, and padding one would add more than "
    f"{PADDING_SHARE:.0%} (limits.PADDING_SHARE)"
)

NO_SECOND = "it is not split over {} too: no other dimension divides by {}"


def layouts(
    paths: Sequence[tuple[Any, ...]],
    leaves: Sequence[Any],
    axes: Axes,
    min_size: int,
    autos: Sequence[AutoSplit | None] | None = None,
    control: Control = NOTHING_ASKED,
    may_be: Collection[str] = (),
) -> tuple[Layout, ...]:
    """The stored sharding of every state leaf, and why.

    Args:
      paths: tree path of each leaf, as `jax.tree_util.tree_flatten_with_path` gives it.
      leaves: anything with `shape` and `dtype`, one per path.
      axes: the mesh axes; leaves are split over the stored one unless asked otherwise.
      min_size: leaves with fewer elements are replicated.
      autos: how automatic axes split each leaf; those dimensions are taken.
      control: over which mesh axes each leaf is split.
      may_be: arguments that may be states besides this one, for errors.

    Returns:
      One layout per leaf.
    """
    summed = list(map(axis_of_terms, paths))
    params = [
        leaf if axis is None else _row(leaf)
        for leaf, axis in zip(leaves, summed, strict=True)
    ]
    ends = [
        p if axis is None else p[:-1] for p, axis in zip(paths, summed, strict=True)
    ]
    stacks = stacked_leaves(ends, [leaf.shape for leaf in params])
    names = list(map(leaf_name, paths))
    control.check(names, any(map(lies_in_part, paths)), may_be)
    autos = [auto or () for auto in autos or [()] * len(stacks)]
    found = []
    for i, (name, leaf, axis) in enumerate(zip(names, leaves, summed, strict=True)):
        if control.of(name).per_device_state:
            found.append(Layout(_per_device(name, leaf, axes), OWN))
            continue
        auto = autos[i] if axis is None else autos[i][1:]
        layout = _leaf_sharding(
            name, params[i], axes, min_size, stacks[i], auto, control.of(name).shard
        )
        found.append(
            layout if axis is None else _of_rows(name, leaf, axis, layout, axes)
        )
    return tuple(found)


def _row(leaf: Any) -> Any:
    """One row of a residual: a leaf like its parameter."""
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)


def _of_rows(name: str, leaf: Any, over: str, row: Layout, axes: Axes) -> Layout:
    """A row for each device along the axis over which terms are summed, and along the
    others each row as a parameter of its shape is."""
    others = axes.replicated if is_flat(row.sharding) else row.sharding
    sharding = tuple(
        of_dim(s, s.dim + 1) if isinstance(s, Split) else None for s in others
    )
    count = axes.size(over)
    if leaf.shape[0] % count:
        raise ShardingError(
            f"state leaf '{name}' has {leaf.shape[0]} rows of terms, and mesh axis "
            f"'{over}' has {count} devices.\n{called()}"
            "Make residuals for this mesh, shardfn.zero_residuals(params, mesh, "
            f"'{over}'), and restore into a state that has those: a checkpoint's rows "
            "are then added up to as many."
        )
    if count > 1:
        axis = axes.names.index(over)
        sharding = on_axis(sharding, axis, Split(0, stored=True))
    return Layout(sharding, (*ROWS, *row.why))


def _per_device(name: str, leaf: Any, axes: Axes) -> Sharding:
    """One row on each device."""
    if leaf.shape[:1] != (axes.devices,):
        raise ShardingError(
            f"state leaf '{name}' has shape {tuple(leaf.shape)}, and per_device_state "
            f"needs a row for each of {axes.devices} devices.\n{called()}"
            "Make the state with step.init(...) or step.shard(state), which add them."
        )
    return tuple(Split(0) if size > 1 else None for size in axes.sizes)


def with_device_rows(
    states: tuple[Any, ...], axes: Axes, control: Control
) -> list[Any]:
    """The leaves of states, with a row for each device in those that devices keep for
    themselves."""
    leaves, _ = leaves_of(states, "state")
    return [
        jnp.broadcast_to(x, (axes.devices, *jnp.shape(x)))
        if control.of(leaf_name(leaf.path)).per_device_state
        else x
        for leaf, x in zip(leaves, jax.tree.leaves(states), strict=True)
    ]


def _leaf_sharding(
    name: str,
    leaf: Any,
    axes: Axes,
    min_size: int,
    stacked: bool,
    auto: AutoSplit,
    asked: tuple[StoredAxis, ...] | None,
) -> Layout:
    """Splits one dimension per mesh axis, the most minor axis first.

    A dimension is never split over two axes: the shards of a leaf over more axes are
    then parts of the shards of one over fewer, as moments are of their parameter.
    """
    named = [axes.names[axes.stored]] if asked is None else list(map(axis_of, asked))
    dims = dict(entry for entry in asked or () if not isinstance(entry, str))
    sharding, shape, size = axes.replicated, leaf.shape, math.prod(leaf.shape)
    taken = {dim for dim, names in enumerate(auto) if names}
    why: list[Why] = (
        [] if asked is None else [("shard={} asks for it", (shown_axes(asked),))]
    )
    for axis in sorted(map(axes.names.index, named), reverse=True):
        count = axes.sizes[axis]
        if count == 1 or size < max(min_size, count) or compat.is_key(leaf.dtype):
            why.append(_too_small(size, min_size, count))
            continue
        if axes.names[axis] in dims:
            dim = _asked_dim(name, shape, dims[axes.names[axis]], count, taken)
            sharding = on_axis(sharding, axis, Split(dim, stored=True))
            taken.add(dim)
            continue
        dim, chosen = _choose_dim(shape, count, stacked, frozenset(taken))
        is_second = sharding != axes.replicated
        if is_second and (dim is None or is_flat(sharding) or shape[dim] % count):
            chosen, dim = (NO_SECOND, (axes.names[axis], count)), None
        why.append(chosen)
        if dim is None:
            continue
        sharding = on_axis(sharding, axis, Split(dim, stored=True))
        taken.add(dim)
    return Layout(sharding, tuple(why))


def _asked_dim(
    name: str, shape: Sequence[int], asked: int, count: int, taken: set[int]
) -> int:
    """The dimension that is asked for, if it can be split."""
    dim = asked + len(shape) if asked < 0 else asked
    size = shape[dim] if 0 <= dim < len(shape) else 0
    padded = -(-size // count) * count
    if size and dim not in taken and padded <= size * (1 + PADDING_SHARE):
        return dim
    if dim in taken:
        why = "which another mesh axis splits"
    elif not size:
        why = "which it does not have"
    else:
        share = f"{PADDING_SHARE:.0%}"
        why = f"and padding its {size} elements to {padded} is more than {share}"
    raise ShardingError(
        f"shard asks to split dimension {asked} of state leaf '{name}' over {count} "
        f"devices, {why}.\n{called()}  its shape is {tuple(shape)}\n"
        "Name another dimension, or the mesh axis alone: then shardfn chooses one."
    )


def _too_small(size: int, min_size: int, count: int) -> Why:
    """Why a leaf is not split over an axis."""
    if count == 1:
        return "the mesh axis has one device", ()
    if size < min_size:
        return "{} elements are fewer than min_size={}", (size, min_size)
    if size < count:
        return "{} elements are fewer than {} devices", (size, count)
    return "PRNG keys are not split", ()


def choose_dim(
    shape: Sequence[int],
    count: int,
    stacked: bool = False,
    taken: frozenset[int] = frozenset(),
) -> int | None:
    """The dimension to split over `count` devices, or `flat(start)`, or None."""
    return _choose_dim(shape, count, stacked, taken)[0]


def _choose_dim(
    shape: Sequence[int], count: int, stacked: bool, taken: frozenset[int]
) -> tuple[int | None, Why]:
    """The dimension to split, or `flat(start)`, or None, and why.

    A dimension that `count` divides wins, one whose shards fill tiles before one whose
    do not. Of those that fill them it is the first of features, since blocks of the
    most major dimension are gathered without a transposed copy; of others the largest.
    The layer dimension of a stack is taken only if no other divides. Without any, the
    dimension that wastes least on padding is taken if it wastes at most 1%, and
    otherwise the leaf is flattened, a stack layer by layer.
    Dimensions in `taken` are split by automatic axes. No other axis splits them too: a
    part of such a block is no block of the gathered value. A leaf that has one is never
    flattened; without another dimension to split, None.
    """

    def waste(dim: int) -> float:
        return -(-shape[dim] // count) * count / max(shape[dim], 1) - 1

    def preference(dim: int) -> tuple[bool, bool, bool, int]:
        fills = _fills_tiles(shape, dim, count)
        first = fills and shape[dim] >= FEATURE_ELEMENTS
        return not (stacked and dim == 0), fills, first, -dim if first else shape[dim]

    dims = [d for d in range(len(shape)) if shape[d] >= count and d not in taken]
    divisible = [d for d in dims if waste(d) == 0]
    if divisible:
        best = max(divisible, key=preference)
        rivals = [d for d in divisible if preference(d)[:2] == preference(best)[:2]]
        text = DIVISIBLE
        if _fills_tiles(shape, best, count):
            text = FIRST if shape[best] >= FEATURE_ELEMENTS else LARGEST
            text = text if len(rivals) > 1 else FILLING
        return best, (text, (count, best, shape[best]))
    padded = [d for d in dims if waste(d) <= PADDING_SHARE and not (stacked and d == 0)]
    if padded:
        best = min(padded, key=lambda d: (waste(d), -shape[d]))
        return best, (PADDED, (count, best, shape[best]))
    if taken:
        return None, ("mesh axes that are left to XLA split its dimensions", ())
    start = 1 if stacked else 0
    size = math.prod(shape[start:])
    even = -(-size // count) * count <= (1 + PADDING_SHARE) * size
    return flat(start if even else 0), (FLATTENED, (count,))


def _fills_tiles(shape: Sequence[int], dim: int, count: int) -> bool:
    from_end = len(shape) - dim
    if from_end > len(TPU_TILE):
        return True
    return (shape[dim] // count) % TPU_TILE[-from_end] == 0
