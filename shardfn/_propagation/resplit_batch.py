"""Splits the batch again after an op that needs it whole.

In: an op that gathered the batch and the shardings of its results. Out: those
shardings, split where the batch lies in them.
"""

from collections.abc import Sequence
from typing import Any

from shardfn._core.op_sharding_rule import OpShardingRule
from shardfn._core.resharding import can_split
from shardfn._core.sharding import Axes, Sharding, Split, on_axis
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
    whole. Without this, all that follows would run on the whole batch on every device.

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
        gathered = [
            (i, state[axis])
            for i, (state, need) in enumerate(zip(states, needed, strict=True))
            if isinstance(state[axis], Split) and need[axis] is None
        ]
        batch = [
            (i, s.dim) for i, s in gathered if isinstance(s, Split) and not s.stored
        ]
        if not batch or any(s[axis] is not None for s in made):
            continue
        for j, aval in enumerate(result_avals):
            if preferences[j][axis] == frozenset({None}):
                continue
            for dim in _batch_dims(rule, batch, j, aval):
                split = Split(dim)
                if can_split(aval.shape, out[j], axis, split, axes):
                    out[j] = on_axis(out[j], axis, split)
                    break
    return out


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
