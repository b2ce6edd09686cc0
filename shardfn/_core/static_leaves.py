"""Leaves that are no arrays: the functions in an Equinox module, names, configurations.

In: a pytree with such leaves. Out: the same pytree in which each is static, a part of
the tree's structure that is compared by value; and back. Leaves that may change unseen,
and arrays of other libraries, stay as they are: they are refused where arrays are read.
"""

import contextlib
import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np

from shardfn._core.optional import equinox, flax_nnx

NUMBERS = (bool, int, float, complex)
"""Python types that JAX takes for scalars."""


@jax.tree_util.register_pytree_node_class
class Static:
    """A leaf that is no array, where it lies in its pytree."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def tree_flatten(self) -> tuple[tuple[()], "Static"]:
        """No leaves."""
        return (), self

    @classmethod
    def tree_unflatten(cls, this: "Static", leaves: Any) -> "Static":
        return this

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Static) or type(self.value) is not type(other.value):
            return False
        mine, others = self.value, other.value
        if isinstance(mine, float):
            return mine.hex() == others.hex()
        with contextlib.suppress(Exception):  # of a class of the user's
            return mine is others or bool(mine == others)
        return False

    def __hash__(self) -> int:
        return hash((type(self.value), self.value))

    def __repr__(self) -> str:
        return repr(self.value)


def close_static(tree: Any) -> Any:
    """A pytree whose leaves that are no arrays are static. What has none, or is closed
    already, stays the same object."""
    if not any(map(_may_be_static, jax.tree.leaves(tree))):
        return tree
    library, made = equinox(), []

    def static(x: Any) -> Static:
        made.append(Static(x))
        return made[-1]

    def of_module(x: Any) -> Any:
        return x if _is_array(x) or not _has_hash(x) else static(x)

    def close(x: Any) -> Any:
        if _is_module(x, library):  # its numbers are no arrays either, by its own rules
            return jax.tree.map(of_module, x)
        return static(x) if is_static(x) else x

    closed = jax.tree.map(close, tree, is_leaf=lambda x: _is_module(x, library))
    return closed if made else tree


def close_call(
    args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, closed each by itself."""
    return tuple(map(close_static, args)), {
        k: close_static(x) for k, x in named.items()
    }


def open_static(tree: Any) -> Any:
    """The pytree of which leaves are static."""
    if not any(isinstance(x, Static) for x in _leaves(tree)):
        return tree
    return jax.tree.map(
        lambda x: x.value if isinstance(x, Static) else x, tree, is_leaf=_is_closed
    )


def without_static(tree: Any) -> Any:
    """A closed pytree with None in place of its static leaves."""
    return jax.tree.map(
        lambda x: None if isinstance(x, Static) else x, tree, is_leaf=_is_closed
    )


def has_static(tree: Any) -> bool:
    """Whether leaves of a pytree would be static."""
    return close_static(tree) is not tree


def is_static(x: Any) -> bool:
    """Whether a leaf is no array, and its value does not change unseen: functions and
    classes, and what compares by value, such as text, or a frozen dataclass."""
    if _is_array(x) or isinstance(x, NUMBERS) or not _has_hash(x):
        return False
    return callable(x) or type(x).__hash__ is not object.__hash__


def returns_closed(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function on closed pytrees, which returns them closed."""

    @functools.wraps(function, updated=())
    def run(*args: Any, **named: Any) -> Any:
        opened = {name: open_static(x) for name, x in named.items()}
        out = function(*map(open_static, args), **opened)
        return close_static(out)

    return run


def statics_of(tree: Any) -> dict[str, Hashable]:
    """The static leaves of a closed pytree, by path."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_closed)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): x.value
        for path, x in flat
        if isinstance(x, Static)
    }


def _leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=_is_closed)


def _is_closed(x: Any) -> bool:
    return isinstance(x, Static)


def _is_module(x: Any, library: Any) -> bool:
    return library is not None and isinstance(x, library.Module)


def _may_be_static(x: Any) -> bool:
    return not _is_array(x) and (isinstance(x, NUMBERS) or is_static(x))


def _is_array(x: Any) -> bool:
    """Whether a leaf is an array, an array's type, or one of another library: those are
    refused rather than compared. Modules of nnx are no values."""
    if isinstance(x, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
        return True
    nnx = flax_nnx()
    if nnx is not None and isinstance(x, nnx.Pytree | nnx.Variable):
        return True
    if isinstance(x, type):
        return False
    return any(hasattr(x, name) for name in _OF_ARRAYS)


_OF_ARRAYS = (
    "__array__",
    "__jax_array__",
    "__dlpack__",
    "__array_interface__",
    "dtype",
)


def _has_hash(x: Any) -> bool:
    with contextlib.suppress(Exception):  # of a class of the user's
        hash(x)
        return True
    return False
