"""Reduces the results of a node where they are made, unless they are to wait.

In: a node's decision, and which of its unreduced results are to be reduced at it. Out:
the decision with the shardings in which the results are left to their consumers.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shardfn._core.limits import JOINED_BYTES
from shardfn._core.program import Node
from shardfn._core.resharding import can_split
from shardfn._core.sharding import Axes, Sharding, Split, Unreduced, on_axis
from shardfn._core.sizes import nbytes
from shardfn._propagation.decision import Decision
from shardfn._propagation.preferences import Preferences, reduced
from shardfn._propagation.resplit_batch import resplit_batch
from shardfn._propagation.stationary import is_stationary


def reduce_at_producer(
    node: Node,
    decision: Decision,
    states: Sequence[Sharding],
    result_avals: Sequence[Any],
    preferences: Sequence[Preferences],
    now: Sequence[Sequence[bool]],
    axes: Axes,
    whole: bool = False,
) -> Decision:
    """Reduces the unreduced results of one node that are to be reduced there.

    Args:
      node: the node.
      decision: how it runs.
      states: shardings of its operands before they are moved for it.
      result_avals: avals of its results.
      preferences: what the consumers of the results prefer.
      now: per result and mesh axis, whether to reduce a sum here.
      axes: the mesh axes.
      whole: whether small sums behind stationary leaves are all-reduced.

    Returns:
      The decision, with the shardings of its results.
    """
    preferences = [
        _of_terms(each, states, whole and nbytes(aval) <= JOINED_BYTES)
        for each, aval in zip(preferences, result_avals, strict=True)
    ]
    results = zip(decision.made, result_avals, preferences, now, strict=True)
    out = [_in_order(_reduced(*result, axes)) for result in results]
    out = [
        _scattered(*result, states, axes)
        for result in zip(decision.made, out, result_avals, preferences, strict=True)
    ]
    if node.kind == "op":
        out = resplit_batch(
            node.rule, decision.operands, states, out, result_avals, preferences, axes
        )
    return replace(decision, results=tuple(out))


def _in_order(made: Sharding) -> Sharding:
    """A sharding in which blocks of runs that were joined are blocks of all."""
    return tuple(
        replace(s, runs=0, moved=True) if isinstance(s, Split) and s.runs else s
        for s in made
    )


def _of_terms(
    preferences: Preferences, states: Sequence[Sharding], whole: bool
) -> Preferences:
    """What is preferred of terms that come from a stationary leaf: their whole sum, or
    they go to the rows of the batch if a consumer has those, rather than to another
    leaf's dimension."""
    out = list(preferences)
    for axis, opinions in enumerate(preferences):
        is_open = not opinions or None in opinions
        if whole and is_open and is_stationary(axis, states):
            out[axis] = frozenset({None})
            continue
        rows = frozenset(s for s in opinions if s is not None and not s.stored)
        if rows and len(rows) < len(opinions) and is_stationary(axis, states):
            out[axis] = rows
    return tuple(out)


def _scattered(
    made: Sharding,
    done: Sharding,
    aval: Any,
    preferences: Preferences,
    states: Sequence[Sharding],
    axes: Axes,
) -> Sharding:
    """`done`, split along what was reduced whole although nobody prefers it so, if
    terms of it come from a stationary leaf: they take the batch's place."""
    for axis, (state, goal) in enumerate(zip(made, done, strict=True)):
        is_whole = isinstance(state, Unreduced) and goal is None
        if not is_whole or preferences[axis] or not is_stationary(axis, states):
            continue
        splits = (Split(dim) for dim in range(len(getattr(aval, "shape", ()))))
        can = (s for s in splits if can_split(aval.shape, done, axis, s, axes))
        done = on_axis(done, axis, next(can, None))
    return done


def _reduced(
    made: Sharding, aval: Any, preferences: Preferences, now: Sequence[bool], axes: Axes
) -> Sharding:
    kept = [
        s == Unreduced("sum") and not soon for s, soon in zip(made, now, strict=True)
    ]
    if all(k or not isinstance(s, Unreduced) for k, s in zip(kept, made, strict=True)):
        return made
    done = reduced(made, preferences, aval, axes)
    return tuple(m if k else d for k, m, d in zip(kept, made, done, strict=True))
