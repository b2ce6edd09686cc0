"""Functions that return no state: losses, evaluations, predictions, generation.

In: the avals of what would be the state, and of what a function returns. Out: whether
nothing that comes back is a state, new or changed by mistake; the state is then read
only.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.tree_util import tree_flatten_with_path

from shardfn._core.call_arguments import parts
from shardfn._core.leaves import path_name
from shardfn._core.optional import flax_nnx
from shardfn._trace.argument_flow import is_array


def returns_no_state(states: Sequence[Any], out: Any) -> bool:
    """Whether no part of what a function returns is like one of the states.

    A part with the structure of a state, with the names of at least half of its leaves,
    or with leaves of the same types is a state that came back: in another place, or
    changed, which is an error elsewhere. Of a state that is one array, it is a part of
    its shape.

    Args:
      states: pytrees of `ShapeDtypeStruct`.
      out: what the function returns, a pytree of `ShapeDtypeStruct`. Where
        that is empty, the answer is no.
    """
    found = [tree for _, tree in parts(out)]
    if not jax.tree.leaves(out):
        return False
    return not any(_is_like(state, tree) for state in states for tree in found)


def include_modules(arguments: Iterable[Any]) -> bool:
    """Whether modules of flax.nnx lie in some arguments. What changes them in place is
    lost where they are copies, so it has to return them."""
    nnx = flax_nnx()
    if nnx is None:
        return False
    leaves = jax.tree.leaves([*arguments], is_leaf=lambda x: isinstance(x, nnx.Pytree))
    return any(isinstance(x, nnx.Pytree) for x in leaves)


def _is_like(state: Any, tree: Any) -> bool:
    if is_array(state):
        return is_array(tree) and tree.shape == state.shape
    if is_array(tree):
        return False
    names, others = _names(state), _names(tree)
    same = jax.tree.structure(state) == jax.tree.structure(tree)
    alike = len(names) > 1 and _types(state) == _types(tree)
    return same or alike or 2 * len(names & others) >= max(len(names), 1)


def _names(tree: Any) -> set[str]:
    return {path_name(path) for path, _ in tree_flatten_with_path(tree)[0]}


def _types(tree: Any) -> Counter[tuple[Any, ...]]:
    return Counter((x.shape, x.dtype) for x in jax.tree.leaves(tree))
