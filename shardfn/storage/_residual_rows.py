"""Residuals that a checkpoint has in other numbers of rows than a state, or not at all.

In: leaves of a state, and what is on disk. Out: which residuals begin with zeros, and
rows that are added up to as many as the state has: only their sum counts.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import tensorstore as ts

from shardfn._core.errors import ResidualWarning, call_site, listed, warn
from shardfn._core.leaves import Leaf
from shardfn._core.residual import axis_of_terms

Shape = tuple[int, ...]
Block = Callable[[ts.TensorStore, Shape], Awaitable[np.ndarray]]
"""Reads one shard of an array, as part of a leaf of a shape."""


def shape_saved(leaf: Leaf, shape: Shape, saved: Shape) -> Shape:
    """The shape that a leaf of `shape` may have on disk, where it has `saved`."""
    is_residual = axis_of_terms(leaf.path) is not None
    return (*saved[:1], *shape[1:]) if is_residual and shape else shape


def absent(leaves: Sequence[Leaf], saved: Mapping[str, Any]) -> frozenset[str]:
    """The names of the residuals of a state that a checkpoint does not have."""
    names = (leaf.name for leaf in leaves if axis_of_terms(leaf.path) is not None)
    return frozenset(name for name in names if name not in saved)


def warn_of(names: Collection[str], number: int) -> None:
    """Warns of residuals that begin with zeros."""
    if names:
        warn(
            f"checkpoint {number} has no residuals {listed(sorted(names))}: they begin "
            f"with zeros.\n  restore was called at {call_site()}\n"
            "The first sums are then rounded as without error feedback; nothing else "
            "is lost.",
            ResidualWarning,
        )


async def added_up(array: ts.TensorStore, shape: Shape, block: Block) -> np.ndarray:
    """One shard of a residual of `shape`, of which `array` has other rows: row `i` is
    the sum of rows `i`, `i + n` and so on, of `n` rows in the state."""
    rows, saved = shape[0], array.shape[0]
    made = None
    for first in range(0, saved, rows):
        last = min(first + rows, saved)
        part = array[first:last][ts.d[0].translate_to[0]]
        read = await block(part, (last - first, *shape[1:]))
        made = read if made is None else made + read
    assert made is not None
    return made
