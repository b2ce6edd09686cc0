"""From one sharding of a value to another: which moves, in what order, at what cost.

In: two shardings and the value's shape. Out: a path of shardings in which neighbours
differ on one mesh axis; each step of it is one move, and `move_of` names it.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from shardfn._core.sharding import (
    Axes,
    AxisSharding,
    Sharding,
    Split,
    Unreduced,
    along,
    axes_of,
    flat_start,
    is_flat,
    local_shape,
    on_axis,
    parts_of,
    stored_shape,
)

COMMUNICATES = (
    "all_gather",
    "psum_scatter",
    "all_to_all",
    "all_reduce",
    "gather_terms",
    "ppermute",
)

WIRE_OPS = {"gather_terms": "all_gather"}
"""The collective of a move that is not called like it: no collective multiplies, so the
terms of a product are gathered and each device multiplies them."""

JOINED = ("all_gather", "psum_scatter", "all_reduce")
"""Moves of several values that can be one collective, if they sum."""


def can_split(
    shape: Sequence[int], sharding: Sharding, axis: int, split: Split, axes: Axes
) -> bool:
    """Whether a value with `sharding` can also be split by `split` along `axis`.

    Only stored values may be padded, and only along one mesh axis.
    """
    start = flat_start(split.dim)
    if start is not None:
        others = on_axis(sharding, axis, None)
        alone = not any(isinstance(s, Split) for s in others)
        return alone and start < len(shape) and math.prod(shape) > 0
    if split.dim >= len(shape) or is_flat(on_axis(sharding, axis, None)):
        return False
    parts = parts_of(on_axis(sharding, axis, None), split.dim, axes)
    size, count = shape[split.dim], axes.sizes[axis]
    if size and size % (parts * count) == 0:
        return True
    return split.stored and parts == 1 and size >= count


def reshard_path(
    start: Sharding, end: Sharding, shape: Sequence[int], axes: Axes
) -> tuple[Sharding, ...]:
    """The shardings to go through from `start` to `end`, both included.

    Moves that shrink the value come first and gathers last, so that a gradient over two
    axes is reduce-scattered over one and then all-reduced over the other as a shard.
    Minor axes, which are the fast ones, shrink first and gather last. Blocks are
    shifted at the very end: first by whole blocks, then by the rows that are left.
    """
    path, unshifted = [start], tuple(map(_unshifted, end))
    while path[-1] != unshifted:
        after = _next(path[-1], unshifted, shape, axes)
        assert after not in path, f"no path from {start} to {end}: {path}"
        path.append(after)
    for axis, state in enumerate(end):
        if isinstance(state, Split) and state.shift:
            rows = local_shape(shape, unshifted, axes)[state.dim]
            blocks = replace(state, shift=round(state.shift / rows) * rows)
            for goal in (blocks, state):
                if path[-1][axis] != goal:
                    path.append(on_axis(path[-1], axis, goal))
    return tuple(path)


def _unshifted(state: AxisSharding) -> AxisSharding:
    return replace(state, shift=0) if isinstance(state, Split) else state


def _next(now: Sharding, end: Sharding, shape: Sequence[int], axes: Axes) -> Sharding:
    steps = (_shrink, _mark_terms, _reduce, _gather)
    return next(s for s in (step(now, end, shape, axes) for step in steps) if s)


def _shrink(
    now: Sharding, end: Sharding, shape: Sequence[int], axes: Axes
) -> Sharding | None:
    """Scatters, slices, or exchanges one axis towards its final split, if it may."""
    for axis in reversed(range(len(axes.names))):
        state, goal = now[axis], end[axis]
        if not isinstance(goal, Split) or state == goal:
            continue
        if isinstance(state, Split):
            if state.dim == goal.dim:
                return on_axis(now, axis, goal)
            if not _can_exchange(now, axis, state, goal, shape, axes):
                continue
        if isinstance(state, Unreduced) and state.op != "sum":
            continue
        done = tuple(a for a in axes_of(end, goal.dim) if a < axis)
        present = axes_of(on_axis(now, axis, None), goal.dim)
        others = on_axis(now, axis, None)
        flat_conflict = (goal.dim < 0 or is_flat(others)) and any(
            isinstance(s, Split) for s in others
        )
        if present == done and not flat_conflict:
            return on_axis(now, axis, goal)
    return None


def _can_exchange(
    now: Sharding,
    axis: int,
    state: Split,
    goal: Split,
    shape: Sequence[int],
    axes: Axes,
) -> bool:
    """Whether an all-to-all can move the split of `axis` to another dimension."""
    if min(state.dim, goal.dim) < 0 or axes_of(now, state.dim) != (axis,):
        return False
    count = axes.sizes[axis]
    local = local_shape(shape, on_axis(now, axis, None), axes)
    return shape[state.dim] % count == 0 and local[goal.dim] % count == 0


def _mark_terms(
    now: Sharding, end: Sharding, shape: Sequence[int], axes: Axes
) -> Sharding | None:
    """Turns a replicated value into terms of a sum: itself on one device, else zero."""
    for axis, (state, goal) in enumerate(zip(now, end, strict=True)):
        if state is None and isinstance(goal, Unreduced):
            return on_axis(now, axis, goal)
    return None


def _reduce(
    now: Sharding, end: Sharding, shape: Sequence[int], axes: Axes
) -> Sharding | None:
    for axis, (state, goal) in enumerate(zip(now, end, strict=True)):
        if isinstance(state, Unreduced) and state != goal:
            return on_axis(now, axis, None)
    return None


def _gather(
    now: Sharding, end: Sharding, shape: Sequence[int], axes: Axes
) -> Sharding | None:
    """Gathers the most minor axis of a dimension that is split by a wrong axis, or that
    is yet to be split by a more major one."""
    for axis in range(len(axes.names)):
        state = now[axis]
        if not isinstance(state, Split) or axes_of(now, state.dim)[-1] != axis:
            continue
        present, final = axes_of(now, state.dim), axes_of(end, state.dim)
        misplaced = any(now[a] != end[a] for a in present)
        if misplaced or any(a < axis and a not in present for a in final):
            return on_axis(now, axis, None)
    return None


def move_of(before: Sharding, after: Sharding) -> tuple[str, int]:
    """Name of the move between two neighbours of a path, and the mesh axis it is
    over."""
    axis = next(a for a, (b, c) in enumerate(zip(before, after, strict=True)) if b != c)
    state, goal = before[axis], after[axis]
    if isinstance(state, Unreduced):
        if isinstance(goal, Split):
            return "psum_scatter", axis
        return ("gather_terms" if state.op == "prod" else "all_reduce"), axis
    if isinstance(state, Split):
        if isinstance(goal, Split):
            if state.shift != goal.shift:
                return "ppermute", axis
            same = state.dim == goal.dim
            return ("relabel" if same else "all_to_all"), axis
        return "all_gather", axis
    return ("slice" if isinstance(goal, Split) else "mask"), axis


def moves_of(path: Sequence[Sharding]) -> list[tuple[str, int]]:
    """Names and mesh axes of the moves along a path."""
    return [move_of(*ends) for ends in itertools.pairwise(path)]


def move_elements(
    before: Sharding, after: Sharding, shape: Sequence[int], axes: Axes
) -> int:
    """Elements of the larger side of a move on one device, padding included."""
    op, axis = move_of(before, after)
    if op == "psum_scatter":
        scattered = stored_shape(shape, after, axes)
        parts = math.prod(
            axes.sizes[a]
            for a, s in enumerate(after)
            if isinstance(s, Split) and a != axis
        )
        return math.prod(scattered) // parts
    if op == "all_gather":
        n = along(before, axis, axes)
        return math.prod(local_shape(shape, before, axes)) * n
    if op == "gather_terms":
        return math.prod(local_shape(shape, before, axes)) * axes.sizes[axis]
    local = local_shape(shape, before, axes)
    if op == "ppermute":
        dim, _, rows = shift_of(before, after, shape, axes)
        return math.prod(local) // local[dim] * (abs(rows) or local[dim])
    return math.prod(local)


def shift_of(
    before: Sharding, after: Sharding, shape: Sequence[int], axes: Axes
) -> tuple[int, int, int]:
    """The dimension that a move shifts the blocks of, by how many blocks or rows."""
    _, axis = move_of(before, after)
    state, goal = before[axis], after[axis]
    assert isinstance(state, Split) and isinstance(goal, Split)
    moved, size = goal.shift - state.shift, local_shape(shape, before, axes)[goal.dim]
    whole, left = (0, moved) if moved % size else (moved // size, 0)
    return goal.dim, whole, left


def devices_of(
    before: Sharding, after: Sharding, shape: Sequence[int], axes: Axes
) -> int:
    """How many devices talk to each other in a move; in a shift, those of a cycle."""
    op, axis = move_of(before, after)
    if op == "ppermute":
        _, blocks, _ = shift_of(before, after, shape, axes)
        return axes.sizes[axis] // math.gcd(blocks or 1, axes.sizes[axis])
    return min(along(before, axis, axes), along(after, axis, axes))


def wire_elements(
    before: Sharding, after: Sharding, shape: Sequence[int], axes: Axes
) -> float:
    """Elements that each device sends in a move, by a ring over the mesh axis."""
    op, axis = move_of(before, after)
    if op not in COMMUNICATES:
        return 0.0
    if op == "ppermute":
        return move_elements(before, after, shape, axes)
    n = devices_of(before, after, shape, axes)
    trips = 2 if op == "all_reduce" else 1
    return trips * move_elements(before, after, shape, axes) * (n - 1) / n
