"""Steps that are methods: `@fully_shard(mesh=mesh)` in a class.

In: the plain step of a class, and an object of it. Out: the step bound to the object,
which it does not keep alive; and what was made of it before.
"""

import functools
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from shardfn._core.errors import ShardingError, call_site

Bound = TypeVar("Bound")
Known = dict[int, tuple[weakref.ref[Any], Any]]
"""Per `id` of an object, the object and the step that is bound to it."""


class Method:
    """A plain step that is bound to an object, weakly: the steps of an object end with
    it."""

    def __init__(self, function: Any, owner: Any) -> None:
        functools.update_wrapper(self, function, updated=())
        self.__signature__ = inspect.signature(types.MethodType(function, owner))
        self.function, self.owner = function, weakref.ref(owner)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.function(self.owner(), *args, **named)


def binds(function: Any) -> bool:
    """Whether a function in a class becomes a method of its objects, as those do that
    `def` and `jax.jit` make."""
    return hasattr(type(function), "__get__")


def bound_to(
    owner: Any, function: Any, known: Known, make: Callable[[Method], Bound]
) -> Bound:
    """The step of one object, made once.

    Args:
      owner: the object.
      function: the plain step of its class.
      known: what was made before.
      make: makes the step of a bound plain step.

    Returns:
      The step.

    Raises:
      ShardingError: the object's class has `__slots__` without `__weakref__`.
    """
    key = id(owner)
    found = known.get(key)
    if found is not None and found[0]() is owner:
        return found[1]
    try:
        alive = weakref.ref(owner, lambda _: known.pop(key, None))
    except TypeError:
        name = getattr(function, "__name__", "step")
        raise ShardingError(
            f"{name} is a method of a {type(owner).__name__}, which cannot be "
            "referred to weakly, so its compiled steps would outlive it.\n"
            f"  {name} was looked up at {call_site()}\n"
            "Add '__weakref__' to its __slots__, or shard a function that takes what "
            "the method reads."
        ) from None
    made = make(Method(function, owner))
    known[key] = alive, made
    return made
