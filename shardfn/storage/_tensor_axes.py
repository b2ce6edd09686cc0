"""How the axes of a tensor on disk become those of a leaf: `(h k) d -> d h k`.

In: that notation, the shapes of both, and a box of the leaf. Out: boxes of the tensor,
and where in the box of the leaf their values belong.
"""

import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardfn.storage._boxes import Index, Shape, runs

Groups = tuple[tuple[str, ...], ...]
"""Per dimension, the axes that it is made of, major to minor."""

_DIMENSION = re.compile(r"\(([\w\s]+)\)|(\w+)")
_SIDE = re.compile(rf"\s*(?:(?:{_DIMENSION.pattern})\s*)*")


@dataclass(frozen=True, slots=True)
class Rearrangement:
    """The dimensions of a tensor and of a leaf, as axes that they have in common."""

    tensor: Groups
    leaf: Groups

    def __str__(self) -> str:
        return f"{_text(self.tensor)} -> {_text(self.leaf)}"

    @property
    def in_tensor(self) -> tuple[str, ...]:
        """Its axes in their order in the file."""
        return tuple(itertools.chain.from_iterable(self.tensor))

    @property
    def in_leaf(self) -> tuple[str, ...]:
        return tuple(itertools.chain.from_iterable(self.leaf))


@functools.lru_cache(maxsize=1024)
def sizes_of(how: Rearrangement, tensor: Shape, leaf: Shape) -> dict[str, int] | None:
    """The size of every axis; None if the shapes do not fit, or do not say it."""
    if (len(tensor), len(leaf)) != (len(how.tensor), len(how.leaf)):
        return None
    known: dict[str, int] = {}
    dims = list(zip((*how.tensor, *how.leaf), (*tensor, *leaf), strict=True))
    for _ in how.in_tensor:  # each round finds one more, or none
        for axes, size in dims:
            unknown = [axis for axis in axes if axis not in known]
            rest = math.prod(known[axis] for axis in axes if axis in known)
            if len(unknown) == 1 and rest and size % rest == 0:
                known[unknown[0]] = size // rest
    if len(known) < len(how.in_tensor):
        return None
    fits = all(math.prod(known[a] for a in axes) == size for axes, size in dims)
    return known if fits else None


def _text(groups: Groups) -> str:
    names = map(" ".join, groups)
    return " ".join(f"({name})" if " " in name else name for name in names)


@functools.cache  # there is a tensor for each layer and expert
def parse(text: str) -> Rearrangement | None:
    """Reads the notation; None if it is none, or if the axes of its sides differ."""
    sides = text.split("->")
    if len(sides) != 2 or not all(_SIDE.fullmatch(side) for side in sides):
        return None
    tensor, leaf = (
        tuple(tuple((group or axis).split()) for group, axis in _DIMENSION.findall(s))
        for s in sides
    )
    found = Rearrangement(tensor, leaf)
    same = sorted(found.in_tensor) == sorted(found.in_leaf)
    return found if same and len(set(found.in_leaf)) == len(found.in_leaf) else None


def unchanged(rank: int) -> Rearrangement:
    """That of a tensor with the dimensions of its leaf."""
    axes = tuple((f"a{dim}",) for dim in range(rank))
    return Rearrangement(axes, axes)


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A box of a tensor, on its axes, and the array that it belongs in."""

    box: Index
    into: np.ndarray


def parts(
    how: Rearrangement, sizes: Mapping[str, int], box: Sequence[slice], into: np.ndarray
) -> Iterator[TensorPart]:
    """The boxes of a tensor that a box of its leaf is made of.

    Args:
      how: how the axes of the tensor become those of the leaf.
      sizes: of the axes.
      box: which part of the leaf.
      into: an array of that part's shape.

    Yields:
      Boxes that do not overlap, each with a view of `into`.
    """
    shapes = [tuple(sizes[axis] for axis in axes) for axes in how.leaf]
    found = [
        runs(rows.start, rows.stop, shape)
        for rows, shape in zip(box, shapes, strict=True)
    ]
    order = [how.in_leaf.index(axis) for axis in how.in_tensor]
    for chosen in itertools.product(*map(list, found)):
        axes = [rows for part, _, _ in chosen for rows in part]
        place = tuple(
            slice(a - rows.start, b - rows.start)
            for (_, a, b), rows in zip(chosen, box, strict=True)
        )
        view = into[(*place, ...)].reshape([s.stop - s.start for s in axes])
        assert np.may_share_memory(view, into), "reshaping split a dimension: a view"
        yield TensorPart(tuple(axes[i] for i in order), view.transpose(order))
