"""What `init` and `abstract` of a step are given.

In: what should be a function that makes the state, and its arguments. Out: a function
that makes it and checks its leaves, or an error that says what to pass.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax

from shardfn._core.errors import ShardingError, called
from shardfn._core.static_leaves import close_static, open_static
from shardfn.storage._leaves import leaves_of
from shardfn.storage._shared_variables import refuse_shared


def checked_init(
    init_fn: Callable[..., Any], args: Sequence[Any], method: str
) -> Callable[..., Any]:
    """`init_fn` on closed arguments, which returns the state closed: leaves that are no
    arrays are static, or it raises where they cannot be.

    Args:
      init_fn: what `method` was given first.
      args: the other arguments.
      method: name of the step's method, for errors.

    Returns:
      A function like `init_fn`.

    Raises:
      ShardingError: `init_fn` is no function, but a state.
    """
    if _is_made(init_fn, args):
        raise ShardingError(
            f"{method} takes the function that makes the state, and was given what it "
            f"made: {_kind(init_fn)}.\n{called()}"
            f"Pass the function and its arguments, step.{method}(create_state, key), "
            "not create_state(key). A state that is there already is split by "
            "step.shard(state)."
        )

    @functools.wraps(init_fn, updated=())
    def make(*args: Any) -> Any:
        made = close_static(init_fn(*map(open_static, args)))
        leaves_of((made,), "state")
        refuse_shared((made,))
        return made

    return make


def in_containers(treedef: Any, leaves: Sequence[Any], method: str, what: str) -> Any:
    """The state's containers with leaves that are no arrays in them.

    Args:
      treedef: how they are put together.
      leaves: what is put into them.
      method: name of the step's method, for errors.
      what: what the leaves are, for errors.

    Returns:
      The pytree.

    Raises:
      ShardingError: a class of the user's takes arrays alone.
    """
    try:
        return jax.tree.unflatten(treedef, leaves)
    except Exception as error:
        raise ShardingError(
            f"{method} cannot put {what} into the containers of the state: "
            f"{type(error).__name__}: {error}.\n{called()}"
            "A class that converts its leaves whenever it is made, in __post_init__ or "
            "tree_unflatten, takes arrays alone, and fails in jax.eval_shape, too. "
            "Convert them in the function that creates the state, or leave what is "
            "no array as it is. step.init and the step itself take such a state."
        ) from error


def _is_made(init_fn: Any, args: Sequence[Any]) -> bool:
    """Whether this is a state. One that can be called, such as an Equinox module, does
    not take the arguments."""
    if not callable(init_fn):
        return True
    is_leaf = jax.tree.structure(init_fn) == jax.tree.structure(0)
    if is_leaf or isinstance(init_fn, type):
        return False
    try:
        inspect.signature(init_fn).bind(*args)
    except TypeError:
        return True
    except ValueError:  # of some functions in C
        return False
    return False


def _kind(made: Any) -> str:
    name = type(made).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
