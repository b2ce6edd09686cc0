"""Splits the batch again after an op that needs it whole, or selects rows of it.

In: an op that gathered the batch, or made terms of some of its rows, and the shardings
of its results. Out: those shardings, split where the batch lies in them.
"""

from collections.abc import Sequence
from typing import Any

from shardfn._core.op_sharding_rule import OpShardingRule
from shardfn._core.resharding import can_split
from shardfn._core.sharding import Axes, AxisSharding, Sharding, Split, on_axis
from shardfn._propagation.preferences import Preferences


def resplit_batch(
    rule: OpShardingRule | None,
    needed: Sequence[Sharding],
    states: Sequence[Sharding],
    made: Sequence[Sharding],
    result_avals: Sequence[Any],
    preferences: Sequence[Preferences],
    axes: Axes,
) -> list[Sharding]:
    """Splits the results of an op that had to gather the batch, where they can be
    split.

    A reshape into microbatches, a sort or a shuffle of the examples takes the batch
    whole, a slice takes some of its rows. Without this, all that follows would run on
    all of these rows on every device.

    Args:
      rule: the op's rule, if it has one.
      needed: shardings that the op needs its operands in.
      states: their shardings before.
      made: shardings of the results.
      result_avals: avals of the results.
      preferences: what the consumers of the results prefer.
      axes: the mesh axes.

    Returns:
      The shardings of the results.
    """
    out = list(made)
    for axis in range(len(axes.names)):
        before, after = ([s[axis] for s in each] for each in (states, needed))
        taken = [i for i, s in enumerate(before) if _selects(rule, i, s)]
        if all(s[axis] is None for s in made):  # else the terms are of a stored value
            taken += [i for i, s in enumerate(after) if s is None]
        batch = [
            (i, s.dim)
            for i in dict.fromkeys(taken)
            if isinstance(s := before[i], Split) and not s.stored
        ]
        if not batch or any(isinstance(s[axis], Split) for s in made):
            continue
        for j, aval in enumerate(result_avals):
            if preferences[j][axis] == frozenset({None}):
                continue
            for dim in _batch_dims(rule, batch, j, aval):
                split = Split(dim, moved=True)
                if can_split(aval.shape, out[j], axis, split, axes):
                    out[j] = on_axis(out[j], axis, split)
                    break
    return out


def _selects(rule: OpShardingRule | None, i: int, state: AxisSharding) -> bool:
    """Whether the op selects some of the rows along which operand `i` is split, so that
    each device gives terms: those rows that it has."""
    if rule is None or not rule.picks or not isinstance(state, Split) or state.dim < 0:
        return False
    factors = rule.operands[i][state.dim]
    return any(rule.reducer(factor) is not None for factor in factors)


def _batch_dims(
    rule: OpShardingRule | None, batch: Sequence[tuple[int, int]], j: int, aval: Any
) -> list[int]:
    """Dimensions of result `j` that the batch lies in, likeliest first."""
    dims: list[int] = []
    for i, dim in batch:
        if rule is not None:
            shared = set(rule.operands[i][dim])
            dims += [d for d, f in enumerate(rule.results[j]) if shared.intersection(f)]
        if dim < len(getattr(aval, "shape", ())):
            dims.append(dim)
    return dims
