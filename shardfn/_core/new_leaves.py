"""Which leaves of what a step returns are those of its new states.

In: what it returned, and what its arguments are. Out: their numbers, or the leaves.
"""

import functools
from typing import Any

import jax

from shardfn._core.call_arguments import StateArguments, numbered, numbers_in, part


@functools.lru_cache(maxsize=64)
def new_leaves(out_tree: Any, meaning: StateArguments) -> tuple[int, ...]:
    """Which leaves of what the step returns are those of new states, in order."""
    if meaning.results is None and out_tree.num_nodes > 1:
        first = out_tree.children()[: len(meaning.arguments)]
        return tuple(range(sum(child.num_leaves for child in first)))
    numbers = numbered(out_tree, range(out_tree.num_leaves))
    return tuple(numbers_in([part(numbers, path) for path in meaning.places]))


def new_arrays(out: Any, meaning: StateArguments) -> list[Any]:
    """Those leaves of what a step returned."""
    if meaning.results is not None:
        return jax.tree.leaves([part(out, path) for path in meaning.places])
    if type(out) is tuple:
        return jax.tree.leaves(out[: len(meaning.arguments)])
    flat, tree = jax.tree.flatten(out)
    return [flat[i] for i in new_leaves(tree, meaning)]
