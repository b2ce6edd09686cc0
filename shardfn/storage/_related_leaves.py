"""Which leaves of a state belong together: layers of a stack, moments of a parameter.

In: tree paths and shapes of the leaves. Out: which leaves stack the layers of a scanned
module, and which automatic axes a moment takes from its parameter.
"""

import functools
from collections.abc import Sequence
from typing import Any

from shardfn._core.automatic_axes import AutoSplit


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


def with_moments(
    paths: Sequence[tuple[Any, ...]],
    shapes: Sequence[Sequence[int]],
    autos: Sequence[AutoSplit | None],
) -> list[AutoSplit]:
    """Gives optimizer moments the automatic axes of their parameters.

    A leaf that is not split over automatic axes takes the split of a leaf of its shape
    whose path ends like its own, in as many keys as any leaf's does; of several, of one
    that says how it is split, and of these of the one whose subtree has most of the
    leaves in common with its own, as `params` has all with `opt_state/0/mu`. It has to
    lie deeper than that leaf, as `opt_state/0/mu/dense/kernel` does and
    `params/norm/scale` near `params/dense/scale` does not, unless it does not say how
    it is split.

    Args:
      paths: tree path of each leaf.
      shapes: its shape.
      autos: its split; None if it does not say.

    Returns:
      The split of every leaf.
    """
    if not any(autos):
        return [()] * len(autos)
    alike: dict[Any, list[int]] = {}
    shape_at = {tuple(p): tuple(s) for p, s in zip(paths, shapes, strict=True)}
    for i, (path, shape) in enumerate(shape_at.items()):
        alike.setdefault((path[-1:], shape), []).append(i)

    @functools.cache
    def found_in(root: tuple[Any, ...], other: tuple[Any, ...]) -> int:
        """How many leaves of a subtree are in the other one, too."""
        n = len(root)
        return sum(
            path[:n] == root and shape_at.get(other + path[n:]) == shape
            for path, shape in shape_at.items()
        )

    out = []
    for i, (path, shape) in enumerate(shape_at.items()):
        others = [j for j in alike[path[-1:], shape] if j != i]
        common = {j: _common_end(path, paths[j]) for j in others}
        longest = max([1, *common.values()])
        found: dict[int, tuple[bool, int, bool]] = {}
        for j in (j for j in others if common[j] == longest):
            is_split, is_deeper = bool(autos[j]), len(path) > len(paths[j])
            if is_split and not is_deeper and autos[i] is not None:
                continue
            says = is_split or (autos[j] is not None and is_deeper)
            in_common = found_in(path[:-longest], tuple(paths[j])[:-longest])
            found[j] = (says, in_common, is_split)
        best = max(found, key=lambda j: found[j], default=i)
        out.append(autos[i] or autos[best] or ())
    return out


def _common_end(a: Sequence[Any], b: Sequence[Any]) -> int:
    """In how many keys two paths end alike."""
    pairs = zip(reversed(a), reversed(b), strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))
