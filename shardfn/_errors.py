"""Error and warning types, and where in the user's code something happened."""

import contextlib
import functools
import os
import sys

import jax
from jax.extend.core import JaxprEqn

from shardfn import _compat

_LIBRARIES = (
    *(os.path.dirname(f) + os.sep for f in (__file__, jax.__file__)),
    functools.__file__,
    contextlib.__file__,
)


class ShardingError(ValueError):
    """The step, its state or its batch cannot be sharded as asked."""


class UnsupportedPrimitiveWarning(UserWarning):
    """A primitive has no op sharding rule and runs on gathered operands."""


def _shorten(place: str) -> str:
    return os.path.basename(place) if place.startswith(os.sep) else place


def where(eqn: JaxprEqn) -> str:
    """The user's line that made `eqn`, such as `train.py:41 (loss_fn)`."""
    place = _shorten(_compat.summarize(eqn))
    if ":" not in place:
        return f"an unknown line ({eqn.primitive.name})"
    file, _, rest = place.partition(":")
    line, _, tail = rest.partition(":")
    function = tail.partition(" ")[2] or rest.partition(" ")[2]
    return f"{file}:{line.split(' ')[0]} {function}".strip()


def call_site() -> str:
    """The user's line that is calling shardfn, such as `train.py:88 (main)`."""
    frame = sys._getframe(1)
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "an unknown line"
    file = os.path.basename(frame.f_code.co_filename)
    return f"{file}:{frame.f_lineno} ({frame.f_code.co_name})"


def _is_library(file: str) -> bool:
    return file.startswith((*_LIBRARIES, "<frozen"))
