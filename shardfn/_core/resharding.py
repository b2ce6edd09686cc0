"""From one sharding of a value to another: which way, at most one mesh axis at a time.

In: two shardings and the value's shape. Out: a path of shardings in which neighbours
differ on one mesh axis, or in a shift over several; what is between them is a move,
which knows itself when it may be taken (see `moves`).
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from shardfn._core.moves import MOVES, move_of
from shardfn._core.sharding import (
    Axes,
    Sharding,
    Split,
    Unreduced,
    axes_of,
    flat_start,
    is_flat,
    local_shape,
    on_axis,
    parts_of,
    plain,
)


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
    return split.stored and parts == 1 and size > 0


def reshard_path(
    start: Sharding, end: Sharding, shape: Sequence[int], axes: Axes
) -> tuple[Sharding, ...]:
    """The shardings to go through from `start` to `end`, both included.

    Moves that shrink the value come first and gathers last, so that a gradient over two
    axes is reduce-scattered over one and then all-reduced over the other as a shard.
    Minor axes, which are the fast ones, shrink first and gather last. Blocks are
    shifted at the very end, by whole blocks and by rows: `Permute.arrivals`.
    Blocks of runs become blocks of all at the very beginning, as no other axis may
    split a block of runs.
    """
    path = [start]
    if start != end and any(isinstance(s, Split) and s.runs for s in start):
        path.append(
            tuple(replace(s, runs=0) if isinstance(s, Split) else s for s in start)
        )
    unshifted = tuple(plain(s) if isinstance(s, Split) else s for s in end)
    while path[-1] != unshifted:
        after = _next(path[-1], unshifted, shape, axes)
        assert after not in path, f"no path from {start} to {end}: {path}"
        path.append(after)
    for axis, goal in enumerate(end):
        if isinstance(goal, Split) and goal != path[-1][axis]:
            size = local_shape(shape, unshifted, axes)[goal.dim]
            for state in (s for kind in MOVES for s in kind.arrivals(goal, size)):
                if path[-1][axis] != state:
                    path.append(_arrived(path[-1], end, state))
    return tuple(path)


def _arrived(now: Sharding, end: Sharding, state: Split) -> Sharding:
    """`now` with all axes that split a dimension at the shift and runs of `state`."""
    for axis in axes_of(end, state.dim):
        goal = end[axis]
        assert isinstance(goal, Split)
        if (goal.shift, goal.runs) != (0, 0):
            there = replace(goal, shift=state.shift, runs=state.runs)
            now = on_axis(now, axis, there)
    return now


def _next(now: Sharding, end: Sharding, shape: Sequence[int], axes: Axes) -> Sharding:
    steps = (_exchange, _shrink, _mark_terms, _reduce, _gather)
    return next(s for s in (step(now, end, shape, axes) for step in steps) if s)


def _exchange(
    now: Sharding, end: Sharding, shape: Sequence[int], axes: Axes
) -> Sharding | None:
    """Exchanges a dimension for another along all axes that are to split it, at once:
    the blocks of one axis alone would not lie together."""
    for axis, state in enumerate(now):
        if not isinstance(state, Split):
            continue
        every = axes_of(now, state.dim)
        goal = end[axis]
        if len(every) < 2 or every[0] != axis or not isinstance(goal, Split):
            continue
        if goal.dim == state.dim or axes_of(now, goal.dim):
            continue
        if axes_of(end, goal.dim) != every or state.group or goal.group:
            continue
        after = now
        for each in every:
            after = on_axis(after, each, end[each])
        if move_of(now, after).fits(shape, axes):
            return after
    return None


def _shrink(
    now: Sharding, end: Sharding, shape: Sequence[int], axes: Axes
) -> Sharding | None:
    """Scatters, slices, or exchanges one axis towards its final split, if it may."""
    for axis in reversed(range(len(axes.names))):
        state, goal = now[axis], end[axis]
        if not isinstance(goal, Split) or state == goal:
            continue
        after = on_axis(now, axis, goal)
        if isinstance(state, Split) and state.dim == goal.dim:
            return after
        if not move_of(now, after).fits(shape, axes):
            continue
        done = tuple(a for a in axes_of(end, goal.dim) if a < axis)
        present = axes_of(on_axis(now, axis, None), goal.dim)
        others = on_axis(now, axis, None)
        flat_conflict = (goal.dim < 0 or is_flat(others)) and any(
            isinstance(s, Split) for s in others
        )
        if present == done and not flat_conflict:
            return after
    return None


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
