"""What values the options of leaves take, in words and as checks.

In: values as users write them. Out: the same as readers get them, or an error that
names the option, the value and what is allowed.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, get_args

import jax.numpy as jnp

from shardfn._core.errors import cannot_be
from shardfn._core.memories import HOST
from shardfn._core.quantized import DTYPES, Rounding, is_quantized

ReshardAfterForward = bool | int | Literal["auto"]
Accumulate = Literal["auto", "scatter", "defer"]
StoredAxis = str | tuple[str, int]
"""A mesh axis that a leaf is stored split over, and which dimension it is to split."""

Prefetch = int | Literal["first", "auto"]
Stationary = bool | Literal["auto"]
Offload = str
"""`"host"`; or `AUTO` or a size: as much goes there as makes the step fit."""

AUTO = "auto"
FIRST = "first"
"""`prefetch`: a layer ahead, but only what the layer uses first."""

_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "GB": 10**9, "MB": 10**6}

WireDtype = str | tuple[tuple[str, str], ...] | None
"""The dtype in which something moves; or mesh axes over which it is quantized, and to
which dtype each."""


class NotAllowed(Exception):
    """A value that an option does not take."""


@dataclass(frozen=True, slots=True)
class OptionValues:
    """The values that an option takes.

    Attributes:
      allowed: what they are, in words.
      read: gives a value as readers get it, or raises `NotAllowed`.
      are_patterns: users pass a tuple of path patterns: of the leaves that have True.
      show: writes a value as users do.
    """

    allowed: str
    read: Callable[[Any], Any]
    are_patterns: bool = False
    show: Callable[[Any], str] = repr

    def of(self, option: str, value: Any) -> Any:
        """`value` as readers get it."""
        try:
            return self.read(value)
        except NotAllowed:
            self.refuse(option, value)

    def refuse(self, option: str, value: Any) -> NoReturn:
        if self.are_patterns:
            cannot_be(option, value, f"Pass {self.allowed}.")
        cannot_be(
            option,
            value,
            f"Pass {self.allowed}, or a mapping from path patterns to such values, "
            f"as in {option.partition('[')[0]}={{'params/layers/*': ...}}.",
        )


def one_of(literal: Any) -> OptionValues:
    """The values of a `Literal`, such as a new option may have in its row."""
    allowed = get_args(literal)

    def read(value: Any) -> Any:
        if not any(type(value) is type(each) and value == each for each in allowed):
            raise NotAllowed
        return value

    return OptionValues(", ".join(map(repr, allowed)), read)


def _reshard(value: Any) -> ReshardAfterForward:
    if isinstance(value, bool) or (isinstance(value, str) and value == "auto"):
        return value  # pyright: ignore[reportReturnType]
    if type(value) is not int or value < 1:
        raise NotAllowed
    return value if value > 1 else False  # 1 equals True, and says the contrary


def _wire_dtype(value: Any) -> WireDtype:
    if isinstance(value, Mapping):
        value = tuple(value.items())
    if not isinstance(value, tuple):
        return None if value is None else _dtype(value)
    pairs = [pair for pair in value if isinstance(pair, tuple) and len(pair) == 2]
    of_axes = {a: _dtype(d) for a, d in pairs if isinstance(a, str) and d is not None}
    if len(of_axes) != len(value) or not all(map(is_quantized, of_axes.values())):
        raise NotAllowed
    return tuple(of_axes.items())


def gives_axes(given: Any, mesh_axes: Sequence[str]) -> bool:
    """Whether it is a mapping from mesh axes to dtypes that values are quantized to."""
    if not isinstance(given, Mapping) or not given:
        return False
    dtypes = (str(each) for each in given.values() if not isinstance(each, Mapping))
    quantized = [is_quantized(each) for each in dtypes]
    return set(given) <= set(mesh_axes) and len(quantized) == len(given) == sum(
        quantized
    )


def _dtype(value: Any) -> str:
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        raise NotAllowed from None
    is_wide = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1
    if not is_wide and not is_quantized(str(dtype)):
        raise NotAllowed
    return str(dtype)


def _shown_dtype(value: WireDtype) -> str:
    return repr(dict(value) if isinstance(value, tuple) else value)


def size_in(text: str) -> int | None:
    """The bytes that a text such as "70GiB" names; None if it names none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]i?B)", text)
    unit = _UNITS.get(match[2]) if match else None
    return int(float(match[1]) * unit) if match and unit else None


def _offload(value: Any) -> str | None:
    is_known = value is None or (isinstance(value, str) and value in (HOST, AUTO))
    if not is_known and not (isinstance(value, str) and size_in(value)):
        raise NotAllowed
    return value


def _axes(value: Any) -> tuple[StoredAxis, ...] | None:
    if value is None or value is False:
        return None if value is None else ()
    if isinstance(value, Mapping):
        value = tuple(value.items())
    entries = (value,) if isinstance(value, str) else value
    if not isinstance(entries, tuple) or not all(map(_is_axis, entries)):
        raise NotAllowed
    return entries


def shown_axes(entries: tuple[StoredAxis, ...] | None) -> str:
    """Mesh axes that a leaf is stored split over, as users write them."""
    if entries and not any(isinstance(entry, str) for entry in entries):
        return repr(dict(e for e in entries if not isinstance(e, str)))
    return repr(entries or (None if entries is None else False))


def _is_axis(entry: Any) -> bool:
    if isinstance(entry, tuple) and len(entry) == 2:
        return isinstance(entry[0], str) and type(entry[1]) is int
    return isinstance(entry, str)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise NotAllowed
    return value


def _prefetch(value: Any) -> Prefetch:
    if isinstance(value, str) and value in (FIRST, AUTO):
        return value  # pyright: ignore[reportReturnType]
    return _count(value)


def layers_ahead(asked: Prefetch) -> int:
    """How many layers ahead all of a layer's weights are asked to be gathered."""
    return 0 if isinstance(asked, str) else asked


def _positive(value: Any) -> int:
    if not _count(value):
        raise NotAllowed
    return value


STATIONARY = one_of(Literal[True, False, "auto"])
RESHARD = OptionValues("True, False, 'auto', a number of devices", _reshard)
WIRE_DTYPE = OptionValues(
    "None, a floating-point dtype such as 'bfloat16', "
    f"{', '.join(map(repr, DTYPES))}, or a mapping from mesh axes to one of the last "
    f"{len(DTYPES)}",
    _wire_dtype,
    show=_shown_dtype,
)
ROUNDING = one_of(Rounding)
ACCUMULATE = one_of(Accumulate)
COUNT = OptionValues("an integer that is not negative", _count)
PREFETCH = OptionValues(f"{COUNT.allowed}, {FIRST!r}, {AUTO!r}", _prefetch)
POSITIVE = OptionValues("an integer that is positive", _positive)
AXES = OptionValues(
    "a mesh axis, a tuple of mesh axes, a mapping from mesh axes to the dimensions "
    "that they split, False or None",
    _axes,
    show=shown_axes,
)
OFFLOAD = OptionValues(
    "None, 'host', 'auto' or the bytes that a step may take of a device such as "
    "'70GiB'",
    _offload,
)
PATTERNS = OptionValues(
    "a tuple of path patterns: ('batch_stats/*',)", bool, are_patterns=True
)


@dataclass(frozen=True, slots=True)
class Option:
    """An option that may differ from leaf to leaf.

    Attributes:
      default: what readers get of a leaf of which nothing is asked.
      values: which it takes.
      read_by: the modules that act on it.
      doc: what it does, for people.
      name: what users call it.
      type: what a type checker lets them pass.
    """

    default: Any
    values: OptionValues
    read_by: tuple[str, ...]
    doc: str
    name: str = ""
    type: Any = Any

    @property
    def default_given(self) -> Any:
        """The default as users write it."""
        return () if self.values.are_patterns else self.default

    @property
    def text(self) -> str:
        """What it does, in one line."""
        return " ".join(inspect.cleandoc(self.doc).split())

    @property
    def summary(self) -> str:
        """What it is, in one clause."""
        clause, _, _ = self.text.partition(". ")[0].partition(": ")
        return clause.rstrip(".").replace("`", "")
