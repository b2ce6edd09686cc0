"""How far rounding alone moves the results of a step.

In: a plain step and its arguments. Out: for each leaf that comes back, the largest
relative change when the arguments, and what the step casts to a narrower dtype, are
rounded in another way. Where a true gradient is zero, or an update takes only its sign,
that change is as large as the leaf.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardfn._core.reading_limits import ROUNDING_TRIALS
from shardfn.testing._compare import Snapshot, relative_error, snapshot
from shardfn.testing._other_casts import casting_otherwise

Noise = Mapping[str, float]
"""Relative change by path."""


def noise(
    step: Callable[..., Any],
    args: Sequence[Any],
    after: Callable[[Sequence[Any], Any], Sequence[Any]],
    steps: int,
    choose: Callable[[Any], Any],
    expected: Snapshot,
) -> Noise:
    """What rounding does to the leaves of one step.

    Args:
      step: the plain step; compiled once for all trials if it is jitted.
      args: its arguments in the first step.
      after: the next step's, of those of a step and what it returned.
      steps: how many steps to run.
      choose: what to compare of the last step's results.
      expected: the same of the run without other rounding.

    Returns:
      The largest relative change of each floating-point leaf.
    """
    moved: dict[str, float] = {}
    step = casting_otherwise(step, tuple(args))
    for seed in range(ROUNDING_TRIALS):
        rng = np.random.default_rng(seed)
        now, out = rounded_otherwise(tuple(args), rng), None
        for _ in range(steps):
            out = step(*now)
            now = after(now, out)
        found = snapshot(choose(out))
        for (path, a), (_, b) in zip(expected.leaves, found.leaves, strict=True):
            if jnp.issubdtype(a.value.dtype, jnp.inexact):
                error = relative_error(a.value, b.value)
                moved[path] = max(moved.get(path, 0.0), error)
    return moved


def rounded_otherwise(tree: Any, rng: np.random.Generator) -> Any:
    """`tree` with the elements of its floating-point arrays one unit of rounding up,
    down, or as they are. Whole numbers stay: masks, counts and one-hot rows mean what
    they are. So do scalars."""

    def move(x: Any) -> Any:
        is_array = isinstance(x, jax.Array | np.ndarray) and x.ndim > 0
        if not is_array or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        wide = np.asarray(x).astype(np.float64)
        way = rng.integers(-1, 2, x.shape) * (wide != np.round(wide))
        return jnp.asarray((wide * (1 + way * float(jnp.finfo(x.dtype).eps))), x.dtype)

    return jax.tree.map(move, tree)
