"""The shardings that the consumers of a value prefer, and what follows for its own.

In: a sharding and preferences. Out: the sharding that suits them.
"""

from typing import Any

from shardfn._core.resharding import can_split
from shardfn._core.sharding import Axes, Sharding, Split, Unreduced, on_axis

Preferences = tuple[frozenset[Split | None], ...]
"""Per mesh axis, the shardings that a value's consumers would take without a move."""


def reduced(
    state: Sharding, preferences: Preferences, aval: Any, axes: Axes
) -> Sharding:
    """`state` with unreduced axes split as preferred, or else replicated."""
    out = state
    for axis, s in enumerate(state):
        if isinstance(s, Unreduced):
            out = on_axis(out, axis, None)
            split = preferred(preferences[axis])
            if split and can_split(aval.shape, out, axis, split, axes):
                out = on_axis(out, axis, split)
    return out


def split_as_preferred(
    state: Sharding, preferences: Preferences, aval: Any, axes: Axes
) -> Sharding:
    """A replicated `state`, split as its consumers prefer if none prefers it whole."""
    for axis, opinions in enumerate(preferences):
        split = preferred(opinions)
        if split is None or None in opinions:
            continue
        if can_split(aval.shape, state, axis, split, axes):
            state = on_axis(state, axis, split)
    return state


def preferred(opinions: frozenset[Split | None]) -> Split | None:
    """The split that most of a value's cost hangs on: a stored one before a batch
    one, and of these one of rows as they came in before others."""
    splits = [s for s in opinions if s is not None]
    return min(splits, key=lambda s: (not s.stored, s.moved, s.dim)) if splits else None


def either(one: Preferences, other: Preferences) -> Preferences:
    """What one or the other prefers."""
    return tuple(a | b for a, b in zip(one, other, strict=True))


def union(preferences: Preferences, state: Sharding) -> Preferences:
    return tuple(
        w | {s} if isinstance(s, Split) else w
        for w, s in zip(preferences, state, strict=True)
    )
