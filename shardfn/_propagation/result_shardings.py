"""Reduces the results of a node where they are made, unless they are to wait.

In: a node's decision, and which of its unreduced results are to be reduced at it. Out:
the decision with the shardings in which the results are left to their consumers.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shardfn._core.program import Node
from shardfn._core.sharding import Axes, Sharding, Unreduced
from shardfn._propagation.op_strategy import Decision
from shardfn._propagation.preferences import Preferences, reduced
from shardfn._propagation.resplit_batch import resplit_batch


def reduce_at_producer(
    node: Node,
    decision: Decision,
    states: Sequence[Sharding],
    result_avals: Sequence[Any],
    preferences: Sequence[Preferences],
    now: Sequence[Sequence[bool]],
    axes: Axes,
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

    Returns:
      The decision, with the shardings of its results.
    """
    results = zip(decision.made, result_avals, preferences, now, strict=True)
    out = [_reduced(*result, axes) for result in results]
    if node.kind == "op":
        out = resplit_batch(
            node.rule, decision.operands, states, out, result_avals, preferences, axes
        )
    return replace(decision, results=tuple(out))


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
