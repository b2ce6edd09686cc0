"""Whether an argument arrives as a state is stored.

In: an argument as it was passed, and how its leaves would be stored. Out: whether they
are, and it can be no batch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from shardfn._core.errors import ShardingError
from shardfn._core.leaves import Leaf
from shardfn._core.sharding import Axes, Sharding, Split, partition_spec
from shardfn.storage._leaves import leaves_of
from shardfn.storage._stored_array import StoredArray


def arrives_stored(
    argument: Any,
    partition: Callable[[Sequence[Leaf], Axes], Sequence[Sharding]],
    axes: Axes,
) -> bool:
    """Whether an argument arrives as its leaves would be stored, and a batch would not.

    Args:
      argument: a pytree.
      partition: the stored shardings of leaves of a state.
      axes: the mesh axes.
    """
    arrays = jax.tree.leaves(argument)
    if any(isinstance(x, StoredArray) for x in arrays):
        return True
    try:
        leaves, _ = leaves_of((argument,), "argument")
        shardings = partition(leaves, axes)
    except ShardingError:  # a leaf that is no array, or none that an option names
        return False
    rows = all(s.dim == 0 for each in shardings for s in each if isinstance(s, Split))
    return not rows and all(
        isinstance(placed := getattr(x, "sharding", None), NamedSharding)
        and placed.spec == partition_spec(sharding, axes)
        for x, sharding in zip(arrays, shardings, strict=True)
    )
