"""Arguments of a step by position, whatever way they were passed.

In: a step, and the arguments of a call. Out: the same by position, so that a call by
name finds what a call by position compiled; those that have to be named come last,
together.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.tree_util import DictKey

from shardfn._core.errors import ShardingError, called, step_name


@jax.tree_util.register_pytree_with_keys_class
class Named(dict[str, Any]):
    """Arguments that have no position: an argument of their own, the last one."""

    def tree_flatten_with_keys(self) -> tuple[list[Any], tuple[str, ...]]:
        """Their values in the order of their names."""
        names = tuple(sorted(self))
        return [(DictKey(name), self[name]) for name in names], names

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], values: Sequence[Any]) -> "Named":
        return cls(zip(names, values, strict=True))


def by_position(
    step: Any, args: Sequence[Any], named: Mapping[str, Any]
) -> Sequence[Any]:
    """The arguments by position.

    Args:
      step: the function that they are for.
      args: arguments passed by position.
      named: arguments passed by name.

    Returns:
      All of them by position; those that the function takes by name only, or behind one
      that is left out, as one `Named` at the end.

    Raises:
      ShardingError: the function does not take them.
    """
    if not named:
        return args
    try:
        signature = inspect.signature(step)
    except ValueError:  # of some functions in C
        return (*args, Named(named))
    try:
        bound = signature.bind(*args, **named)
    except TypeError as error:
        raise ShardingError(
            f"{step_name()} does not take these arguments: {error}.\n{called()}"
            f"Its arguments are {signature}."
        ) from None
    return (*bound.args, Named(bound.kwargs)) if bound.kwargs else bound.args
