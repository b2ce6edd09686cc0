"""What one node prefers of its operands, by what is preferred of its results.

In: the node's rule or control flow, its decision, and the preferences of its results.
Out: per operand, the shardings that the node takes without a move.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from shardfn._core.op_sharding_rule import OpShardingRule
from shardfn._core.sharding import (
    Axes,
    Sharding,
    Split,
    Unreduced,
    flat_start,
    of_dim,
    plain,
)
from shardfn._propagation.decision import Decision
from shardfn._propagation.preferences import Preferences, union
from shardfn._propagation.splittable_factors import filled_factors


def flow_preferences(preferences: Preferences, needed: Sharding) -> Preferences:
    """What control flow prefers of one operand."""
    open_to = (
        frozenset() if isinstance(s, Unreduced) else opinions
        for opinions, s in zip(preferences, needed, strict=True)
    )
    return union(tuple(open_to), needed)


def op_preferences(
    rule: OpShardingRule,
    decision: Decision,
    sizes: Sequence[int],
    results: Sequence[Preferences | None],
    axes: Axes,
) -> tuple[Preferences, ...]:
    """What an op prefers of its operands, of these numbers of elements."""
    filled = filled_factors(rule, decision.parts, axes)
    chosen = {axis for _, axis in decision.parts}
    splittable = functools.cache(lambda factor: rule.is_splittable(factor, filled))

    def preferred_of(i: int, axis: int) -> frozenset[Split | None]:
        state = decision.operands[i][axis]
        if not sizes[i]:
            return frozenset()
        if isinstance(state, Split):
            return frozenset({plain(state)})
        if axis in chosen:
            return frozenset({None} if state is None else ())
        return frozenset(
            _through(rule, dims, rule.operands[i], preference, filled, splittable)
            for dims, preferences in zip(rule.results, results, strict=True)
            for preference in (preferences[axis] if preferences else ())
        )

    each = range(len(axes.names))
    return tuple(tuple(preferred_of(i, a) for a in each) for i in range(len(sizes)))


def _through(
    rule: OpShardingRule,
    result: Any,
    operand: Any,
    preference: Split | None,
    filled: frozenset[str],
    splittable: Callable[[str], bool],
) -> Split | None:
    """The split of an operand that makes the result split as preferred."""
    if preference is None:
        return None
    start = flat_start(preference.dim)
    if start is not None:
        same_start = (
            rule.flat and len(operand) > start and operand[:start] == result[:start]
        )
        return preference if same_start else None
    factor = rule.major(result, preference.dim, filled)
    if factor is None or not splittable(factor):
        return None
    dim = rule.dim_of(operand, factor)
    return None if dim is None else of_dim(preference, dim)
