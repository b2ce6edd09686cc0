"""Which dimension of each state leaf is stored split.

In: shapes, dtypes and tree paths of a state. Out: one `Sharding` per leaf. The choice
looks at nothing else, so `init`, `shardings`, checkpoints and the step always agree,
and an optimizer moment is split like its parameter.
"""

import math
from collections.abc import Sequence
from typing import Any

from shardfn import _compat
from shardfn._sharding import Axes, Sharding, Split, flat, on_axis

TILE = (8, 128)
"""Rows and columns of a TPU tile; a shard that does not fill tiles is padded on the
wire."""

MAX_WASTE = 0.01
"""Padding of a dimension above which a leaf is stored flattened instead."""


def partition(
    paths: Sequence[tuple[Any, ...]],
    leaves: Sequence[Any],
    axes: Axes,
    min_size: int,
) -> tuple[Sharding, ...]:
    """The stored sharding of every state leaf.

    Args:
      paths: tree path of each leaf, as `jax.tree_util.tree_flatten_with_path` gives it.
      leaves: anything with `shape` and `dtype`, one per path.
      axes: the mesh axes; leaves are split over the last one.
      min_size: leaves with fewer elements are replicated.

    Returns:
      One sharding per leaf.
    """
    stacks = stacked_leaves(paths, [leaf.shape for leaf in leaves])
    return tuple(
        _leaf_sharding(leaf, axes, min_size, stacked)
        for leaf, stacked in zip(leaves, stacks, strict=True)
    )


def _leaf_sharding(leaf: Any, axes: Axes, min_size: int, stacked: bool) -> Sharding:
    size = math.prod(leaf.shape)
    is_key = _compat.is_key(leaf.dtype)
    count = axes.sizes[axes.stored]
    if is_key or count == 1 or size < max(min_size, count):
        return axes.replicated
    dim = choose_dim(leaf.shape, count, stacked)
    return on_axis(axes.replicated, axes.stored, Split(dim, stored=True))


def choose_dim(shape: Sequence[int], count: int, stacked: bool = False) -> int:
    """The dimension to split over `count` devices, or `flat(start)`.

    A dimension that `count` divides wins, one whose shards fill tiles before one whose
    do not, then the largest. The layer dimension of a stack is taken only if no other
    divides. Without any, the dimension that wastes least on padding is taken if it
    wastes at most 1%, and otherwise the leaf is flattened, a stack layer by layer.
    """

    def waste(dim: int) -> float:
        return -(-shape[dim] // count) * count / max(shape[dim], 1) - 1

    def preference(dim: int) -> tuple[bool, bool, int]:
        return not (stacked and dim == 0), _fills_tiles(shape, dim, count), shape[dim]

    dims = [d for d in range(len(shape)) if shape[d] >= count]
    divisible = [d for d in dims if waste(d) == 0]
    if divisible:
        return max(divisible, key=preference)
    padded = [d for d in dims if waste(d) <= MAX_WASTE and not (stacked and d == 0)]
    if padded:
        return min(padded, key=lambda d: (waste(d), -shape[d]))
    start = 1 if stacked else 0
    size = math.prod(shape[start:])
    return flat(start if -(-size // count) * count <= (1 + MAX_WASTE) * size else 0)


def _fills_tiles(shape: Sequence[int], dim: int, count: int) -> bool:
    from_end = len(shape) - dim
    if from_end > len(TILE):
        return True
    return (shape[dim] // count) % TILE[-from_end] == 0


def stacked_leaves(
    paths: Sequence[tuple[Any, ...]], shapes: Sequence[Sequence[int]]
) -> list[bool]:
    """Whether dimension 0 of each leaf looks like the layers of a scanned module.

    It does if the leaf lies in a subtree whose leaves all have that leading size and at
    least two dimensions, and not all the same rank: a kernel `[L, D, F]` beside a norm
    scale `[L, D]`. Only the choice of the stored dimension depends on it.
    """
    subtrees: dict[tuple[str, ...], list[int]] = {}
    for i, path in enumerate(paths):
        keys = tuple(map(str, path))
        for depth in range(len(keys)):
            subtrees.setdefault(keys[:depth], []).append(i)
    stacked = [False] * len(paths)
    for members in subtrees.values():
        ranks = {len(shapes[i]) for i in members}
        if min(ranks) < 2 or len(ranks) < 2:
            continue
        if len({shapes[i][0] for i in members}) == 1:
            for i in members:
                stacked[i] = True
    tails = {
        _tail(path, shape)
        for path, shape, is_stack in zip(paths, shapes, stacked, strict=True)
        if is_stack
    }
    return [_tail(*leaf) in tails for leaf in zip(paths, shapes, strict=True)]


def _tail(path: Sequence[Any], shape: Sequence[int]) -> tuple[Any, ...]:
    """What a parameter and its moments have in common, whatever lies beside them."""
    return tuple(map(str, path[-2:])), tuple(shape)
