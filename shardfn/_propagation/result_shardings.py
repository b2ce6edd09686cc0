"""Reduces the results of a node where they are made, unless they are to wait.

In: a node's decision, and which of its unreduced results the last review settled. Out:
the decision with the shardings in which the results are left to their consumers.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shardfn._core.program import Node
from shardfn._core.sharding import Axes, Sharding, Unreduced
from shardfn._propagation.op_strategy import Decision
from shardfn._propagation.preferences import Wants, reduced
from shardfn._propagation.split_again import split_again


def settled(
    node: Node,
    decision: Decision,
    states: Sequence[Sharding],
    result_avals: Sequence[Any],
    wants: Sequence[Wants],
    now: Sequence[Sequence[bool]],
    axes: Axes,
) -> Decision:
    """Settles the results of one node.

    Args:
      node: the node.
      decision: how it runs.
      states: shardings of its operands before they are moved for it.
      result_avals: avals of its results.
      wants: what the consumers of the results want.
      now: per result and mesh axis, whether to reduce a sum here.
      axes: the mesh axes.

    Returns:
      The decision, settled.
    """
    results = zip(decision.made, result_avals, wants, now, strict=True)
    out = [_settled(*result, axes) for result in results]
    if node.kind == "op":
        out = split_again(
            node.rule, decision.operands, states, out, result_avals, wants, axes
        )
    return replace(decision, settled=tuple(out))


def _settled(
    made: Sharding, aval: Any, wants: Wants, now: Sequence[bool], axes: Axes
) -> Sharding:
    kept = [
        s == Unreduced("sum") and not soon for s, soon in zip(made, now, strict=True)
    ]
    if all(k or not isinstance(s, Unreduced) for k, s in zip(kept, made, strict=True)):
        return made
    done = reduced(made, wants, aval, axes)
    return tuple(m if k else d for k, m, d in zip(kept, made, done, strict=True))
