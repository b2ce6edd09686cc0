"""What values the arguments of public functions take, in words and as checks.

In: arguments as users write them. Out: nothing, or an error that names the function,
the argument, its value and what to pass. `option_values` has those of the options of
leaves.
"""

import contextlib
import math
import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from shardfn._core.errors import cannot_be


@dataclass(frozen=True, slots=True)
class ArgumentKind:
    """A kind of argument.

    Attributes:
      advice: what to pass, a sentence.
      is_one: whether a value is of this kind.
    """

    advice: str
    is_one: Callable[[Any], bool]

    def or_none(self) -> "ArgumentKind":
        """The same, where the argument may be left out."""
        advice = f"{self.advice.removesuffix('.')}, or None."
        return ArgumentKind(advice, lambda value: value is None or self.is_one(value))


def check_arguments(asker: str, **given: tuple[Any, ArgumentKind]) -> None:
    """Raises for the first argument of function `asker` that is not of its kind.

    Args:
      asker: what the user called.
      **given: the value and the kind of each argument.

    Raises:
      ShardingError: an argument is of another kind.
    """
    for name, (value, kind) in given.items():
        if not kind.is_one(value):
            cannot_be(name, value, kind.advice, asker)


def _integer(value: Any) -> int | None:
    with contextlib.suppress(TypeError):
        return None if isinstance(value, bool) else operator.index(value)
    return None


def count_of(value: Any, least: int = 0) -> int | None:
    """A value as an integer of `least` or more; None if it is no such number."""
    number = _integer(value)
    return None if number is None or number < least else number


def _is_count(value: Any, least: int = 0) -> bool:
    return count_of(value, least) is not None


def _is_tolerance(value: Any) -> bool:
    with contextlib.suppress(TypeError, ValueError):
        if not isinstance(value, bool | str | bytes):
            return float(value) >= 0 and not math.isnan(value)
    return False


def _is_regex(value: Any) -> bool:
    with contextlib.suppress(re.error, TypeError):  # bytes, and no pattern at all
        return isinstance(re.compile(value).pattern, str)
    return False


def _are(values: Any, is_one: Callable[[Any], bool]) -> bool:
    """Whether these are several values, each of a kind."""
    is_sequence = isinstance(values, Sequence) and not isinstance(values, str | bytes)
    return is_sequence and all(map(is_one, values))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_entry(value: Any) -> bool:
    """Whether this is what a PartitionSpec has for a dimension."""
    unconstrained = value is PartitionSpec.UNCONSTRAINED
    return value is None or unconstrained or _is_text(value) or _are(value, _is_text)


def _is_dtype(value: Any) -> bool:
    with contextlib.suppress(TypeError):
        return value is not None and jnp.dtype(value) is not None
    return False


COUNT = ArgumentKind("Pass a whole number that is not negative.", _is_count)
POSITIVE = ArgumentKind(
    "Pass a whole number of 1 or more.", lambda value: _is_count(value, 1)
)
WHOLE = ArgumentKind("Pass a whole number.", lambda value: _integer(value) is not None)
SIZE = ArgumentKind(
    "Pass bytes as a whole number, or a text such as '70GiB'.",
    lambda value: _is_text(value) or _is_count(value),
)
TOLERANCE = ArgumentKind(
    "Pass a number that is not negative, such as 1e-5.", _is_tolerance
)
FLAG = ArgumentKind("Pass True or False.", lambda value: isinstance(value, bool))
TEXT = ArgumentKind("Pass a string.", _is_text)
PATTERN = ArgumentKind(
    "Pass the path of a leaf or subtree, in which * stands for any characters, or a "
    "line such as 'train.py:12'.",
    _is_text,
)
REGEXES = ArgumentKind(
    "Pass a tuple of regular expressions, each a string, such as (r'/bias$',), or what "
    "re.compile makes of one.",
    lambda value: _are(value, _is_regex),
)
TEXTS = ArgumentKind(
    "Pass a string, or a tuple of strings.",
    lambda value: _is_text(value) or _are(value, _is_text),
)
NAMES = ArgumentKind(
    "Pass a tuple of names, such as ('data',).", lambda value: _are(value, _is_text)
)
COUNTS = ArgumentKind(
    "Pass a tuple of whole numbers of 1 or more, such as (2, 4).",
    lambda value: _are(value, POSITIVE.is_one),
)
NUMBERS = ArgumentKind(
    "Pass a tuple of whole numbers of 0 or more.", lambda value: _are(value, _is_count)
)
FUNCTION = ArgumentKind("Pass a function.", callable)
MAPPING = ArgumentKind(
    "Pass a mapping, such as a dictionary.", lambda value: isinstance(value, Mapping)
)
MAPPING_OR_FUNCTION = ArgumentKind(
    "Pass a mapping, such as a dictionary, or a function.",
    lambda value: isinstance(value, Mapping) or callable(value),
)
PATH = ArgumentKind(
    "Pass a path: a string, or an object such as pathlib.Path.",
    lambda value: isinstance(value, str | os.PathLike),
)
MESH = ArgumentKind(
    "Pass a mesh, such as jax.make_mesh((jax.device_count(),), ('data',)).",
    lambda value: isinstance(value, Mesh | AbstractMesh),
)
STEP = ArgumentKind(
    "Pass the step that fully_shard made with a mesh.",
    lambda value: hasattr(value, "storage") and hasattr(value, "mesh"),
)
DTYPE = ArgumentKind("Pass a dtype, such as jnp.bfloat16.", _is_dtype)
SPEC = ArgumentKind(
    "Pass a PartitionSpec of mesh axes, such as jax.P('data').",
    lambda value: (
        isinstance(value, PartitionSpec | tuple | list) and all(map(_is_entry, value))
    ),
)
COMPILED = ArgumentKind(
    "Pass step.lower(...).compile(), or its text in HLO.",
    lambda value: _is_text(value) or hasattr(value, "as_text"),
)
ARRAY = ArgumentKind(
    "Pass an array, or a ShapeDtypeStruct.",
    lambda value: hasattr(value, "dtype") and hasattr(value, "shape"),
)
NUMERIC = ArgumentKind(
    "Pass a pytree of arrays, or of ShapeDtypeStructs.",
    lambda value: (
        ARRAY.is_one(value) or isinstance(value, bool | int | float | complex)
    ),
)


def some_of(names: Sequence[str]) -> ArgumentKind:
    """Some of these names, or none."""
    listed = ", ".join(map(repr, names))
    advice = f"Pass a tuple of some of {listed}, such as ({names[0]!r},)."
    return ArgumentKind(advice, lambda value: _are(value, lambda x: x in names))
