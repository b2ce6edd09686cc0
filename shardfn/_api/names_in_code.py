"""Whether a function's code names something, such as a mesh axis.

In: a function and names. Out: whether one of them is a constant, a default, a global or
an attribute that the function, or what it calls, may use. Nothing is run.
"""

import contextlib
import functools
import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from shardfn._api.methods import Method
from shardfn._core.limits import REACHED_OBJECTS

_OPAQUE = (types.ModuleType, jax.Array, np.ndarray, np.generic, int, float, bytes)
_LIBRARIES = ("jax", "jaxlib", "numpy", "builtins", "shardfn")


def mentions(function: Any, names: Collection[str]) -> bool:
    """Whether `function`, or something that it reaches, holds one of `names`."""
    seen: dict[int, Any] = {}
    left = [function]
    while left:
        value = left.pop()
        if isinstance(value, str):
            if value in names:
                return True
        elif id(value) not in seen and not isinstance(value, _OPAQUE):
            seen[id(value)] = value
            with contextlib.suppress(Exception):  # of attributes that are computed
                left.extend(_parts(value))
        if len(seen) > REACHED_OBJECTS:
            return True
    return False


def _parts(value: Any) -> Iterator[Any]:
    """What `value` is made of, as far as it is not a library's."""
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, tuple | list | set | frozenset):
        yield from value
    elif isinstance(value, types.CodeType):
        yield from value.co_consts
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, Method):
        yield from (value.function, value.owner())
    elif isinstance(value, types.FunctionType):
        if not _is_library(value.__module__):
            yield from (value.__code__, value.__defaults__, value.__kwdefaults__)
            yield from (cell.cell_contents for cell in _filled(value.__closure__))
            yield from _globals(value)
    elif hasattr(value, "__wrapped__"):
        yield value.__wrapped__
    elif isinstance(value, type):
        if not _is_library(value.__module__):
            yield from vars(value).values()
            yield from value.__mro__[1:]
    elif not _is_library(type(value).__module__):
        yield from getattr(value, "__dict__", {}).values()
        yield type(value)


def _globals(function: types.FunctionType) -> Iterator[Any]:
    """The globals that a function may use, and such attributes of modules among them;
    those of functions inside it too."""
    used: set[str] = set()
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        used.update(code.co_names)
        codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
    for name in used & function.__globals__.keys():
        value = function.__globals__[name]
        yield value
        if isinstance(value, types.ModuleType) and not _is_library(value.__name__):
            yield from (vars(value)[n] for n in used & vars(value).keys())


def _filled(closure: Any) -> Iterator[Any]:
    for cell in closure or ():
        try:
            _ = cell.cell_contents
        except ValueError:  # assigned later
            continue
        yield cell


def _is_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES
