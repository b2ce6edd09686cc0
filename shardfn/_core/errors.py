"""Error and warning types, and places in the user's code.

In: an equation, a frame, a call that goes on. Out: the words of a message."""

import contextlib
import contextvars
import functools
import os
import reprlib
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import jax
from jax.extend.core import JaxprEqn, jaxprs_in_params

from shardfn._core import compat
from shardfn._core.shown_limits import SHOWN_LEAVES, SHOWN_VALUE

Method = TypeVar("Method", bound=Callable[..., Any])

UNKNOWN = "an unknown line"

_LIBRARIES = (
    compat.PACKAGE,
    os.path.dirname(jax.__file__) + os.sep,
    functools.__file__,
    contextlib.__file__,
)


class ShardingError(ValueError):
    """The step, its state or its batch cannot be sharded as asked."""


class UnsupportedPrimitiveWarning(UserWarning):
    """A primitive has no op sharding rule and runs on gathered operands."""


class ReplicatedComputeWarning(UserWarning):
    """Most of what a device computes is the same on every device."""


class UnusedAxisWarning(UserWarning):
    """Nothing is split over an axis of the mesh."""


class StaticArgumentWarning(UserWarning):
    """A step is compiled for each value of a leaf that is no array."""


class InexactSignWarning(UserWarning):
    """An update takes the sign of a gradient whose terms are quantized."""


class ResidualWarning(UserWarning):
    """A residual is fed back to a sum that is exact, or begins with zeros."""


class OffloadWarning(UserWarning):
    """A step takes more of a device than the bound that `offload` was given, or has
    values in the host's memory where they need an option that it cannot set."""


class VerificationWarning(UserWarning):
    """A compiled step moves something else than its plan says."""


def _shorten(place: str) -> str:
    return os.path.basename(place) if place.startswith(os.sep) else place


def where(eqn: JaxprEqn) -> str:
    """The user's line that made `eqn`, such as `train.py:41 (loss_fn)`."""
    place = _shorten(compat.summarize(eqn))
    if ":" not in place:
        return f"{UNKNOWN} ({eqn.primitive.name})"
    file, _, rest = place.partition(":")
    line, _, tail = rest.partition(":")
    function = tail.partition(" ")[2] or rest.partition(" ")[2]
    return f"{file}:{line.split(' ')[0]} {function}".strip()


def nested(jaxpr: Any) -> Iterator[tuple[JaxprEqn, ...]]:
    """Every equation of a jaxpr, last in a tuple of those it is in, outermost first."""
    for eqn in compat.open_jaxpr(jaxpr)[0].eqns:
        yield (eqn,)
        for body in jaxprs_in_params(eqn.params):
            yield from ((eqn, *inner) for inner in nested(body))


def where_in(eqns: Sequence[JaxprEqn]) -> str:
    """The user's line of the last of `nested` equations, or of the nearest around it
    that has one: what is called may have been traced before, from another line."""
    places = map(where, reversed(eqns))
    return next((p for p in places if not p.startswith(UNKNOWN)), UNKNOWN)


_step: contextvars.ContextVar[str] = contextvars.ContextVar("step", default="the step")

_asked: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "asked", default=None
)
"""What the user called, such as `train_step.shard`."""


def without_bound(step: Any) -> Any:
    """The function that the arguments of `functools.partial` are bound to."""
    while isinstance(step, functools.partial):
        step = step.func
    return step


@contextlib.contextmanager
def calling(step: object, method: str | None = None) -> Iterator[None]:
    """While it is entered, messages call the user's step by its name, and what was
    called after this method of it, if it is not part of another call."""
    step = without_bound(step)
    name = getattr(step, "__name__", type(step).__name__)
    asked = _asked.get()
    if method is not None:
        asked = name if method == "__call__" else f"{name}.{method}"
    tokens = _step.set(name), _asked.set(asked)
    try:
        yield
    finally:
        _step.reset(tokens[0])
        _asked.reset(tokens[1])


_outside: contextvars.ContextVar[str] = contextvars.ContextVar("line", default=UNKNOWN)
"""Where a call comes from that no line of the user's makes."""


@contextlib.contextmanager
def called_from(place: str) -> Iterator[None]:
    """While it is entered, what no line of the user's calls is called at `place`."""
    token = _outside.set(place)
    try:
        yield
    finally:
        _outside.reset(token)


def names_step(method: Method) -> Method:
    """Makes a method of a transformed step name the plain one in messages, and itself.
    What it runs is compiled, under `jax.disable_jit` too: a plan needs the whole step.
    """

    @functools.wraps(method)
    def named(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = None if _is_inner(sys._getframe(1)) else method.__name__
        with calling(self.plain.step, own), compat.jit_enabled():
            return method(self, *args, **kwargs)

    return named  # pyright: ignore[reportReturnType]


def names_call(function: Method) -> Method:
    """Makes messages say that a function was called, or what calls it here."""

    @functools.wraps(function)
    def named(*args: Any, **kwargs: Any) -> Any:
        if _is_inner(sys._getframe(1)):
            return function(*args, **kwargs)
        token = _asked.set(function.__name__)
        try:
            return function(*args, **kwargs)
        finally:
            _asked.reset(token)

    return named  # pyright: ignore[reportReturnType]


def _is_inner(caller: types.FrameType) -> bool:
    """Whether what is called is part of another call, which messages name."""
    is_own = caller.f_code.co_filename.startswith(compat.PACKAGE)
    return is_own and _asked.get() is not None


def step_name() -> str:
    """The name of the step that is being called."""
    return _step.get()


def called() -> str:
    """The line of a message that says what the user called, and where."""
    return f"  {_asked.get() or step_name()} was called at {call_site()}\n"


def listed(names: Sequence[str], shown: int = SHOWN_LEAVES) -> str:
    """Names of leaves for a message, such as `'a', 'b' and 3 more`."""
    if not names:
        return "none"
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(f"'{name}'" for name in names[:shown]) + more


def cannot_be(
    option: str, value: Any, advice: str, asker: str = "fully_shard"
) -> NoReturn:
    """Refuses a value of an option of `fully_shard`, or an argument of `asker`."""
    raise ShardingError(
        f"{option} cannot be {_short.repr(value)}.\n"
        f"  {asker} was called at {call_site()}\n{advice}"
    )


_short = reprlib.Repr()
_short.maxstring = _short.maxother = SHOWN_VALUE


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the user's line that is calling shardfn, however deep this is."""
    frame = _user_frame()
    if frame is None:  # no line of the user's makes the call
        warnings.warn_explicit(message, category, _outside.get(), 0)
        return
    names = frame.f_globals
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        names.get("__name__"),
        names.setdefault("__warningregistry__", {}),
    )


def call_site() -> str:
    """The user's line that is calling shardfn, such as `train.py:88 (main)`."""
    frame = _user_frame()
    if frame is None:
        return _outside.get()
    return _line(frame, frame.f_lineno)


def _user_frame() -> types.FrameType | None:
    """What calls shardfn, if that is the user's."""
    frame = sys._getframe(1)
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def last_line(error: BaseException) -> str:
    """The last line of the user's that an error came through."""
    trace, place = error.__traceback__, UNKNOWN
    while trace is not None:
        if not _is_library(trace.tb_frame.f_code.co_filename):
            place = _line(trace.tb_frame, trace.tb_lineno)
        trace = trace.tb_next
    return place


def _line(frame: types.FrameType, number: int) -> str:
    file = os.path.basename(frame.f_code.co_filename)
    return f"{file}:{number} ({frame.f_code.co_name})"


def _is_library(file: str) -> bool:
    return file.startswith((*_LIBRARIES, "<frozen"))
