"""Arguments that a step takes as Python values, such as `train=True`.

In: a method that traces the step. Out: the same, whose errors say which arguments have
to be bound, where that is the cause.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax

from shardfn._api.call_arguments import parameter_names
from shardfn._core.errors import (
    UNKNOWN,
    ShardingError,
    called,
    last_line,
    step_name,
)
from shardfn._core.sharding import Axes
from shardfn._trace.trace_step import trace_once
from shardfn.storage._leaves import leaves_of

Method = TypeVar("Method", bound=Callable[..., Any])

Python = Mapping[int | str, bool | int | float]
"""Arguments that are Python numbers, by position or name."""

_OF_TRACERS = (TypeError, ValueError, IndexError)
"""What JAX raises where a step asks for a value: for a branch, for the length of a loop
that is differentiated or a static argument, and for the bound of a slice."""

_TRACERS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
"""Those of them that name the function that is traced, and its argument."""


def advises_binding(method: Method) -> Method:
    """Makes a method of a sharded step, which takes the step's arguments, say how to
    bind those that the step needs the values of."""

    @functools.wraps(method)
    def advised(self: Any, *args: Any, **named: Any) -> Any:
        try:
            return method(self, *args, **named)
        except ShardingError:
            raise
        except _OF_TRACERS as error:
            given = dict(enumerate(args)) | named
            static = {
                p: x for p, x in given.items() if isinstance(x, bool | int | float)
            }
            step, axes = self.plain.step, self.storage.axes
            works = functools.partial(_works, step, args, named, axes)
            if not static or works({}) or not works(static):
                own = _of_the_step(step, args, named, error)
                if own is None:
                    raise
                raise own from None
            _refuse(step, static, error)

    return advised  # pyright: ignore[reportReturnType]


def _of_the_step(
    step: Callable[..., Any],
    args: Sequence[Any],
    named: Mapping[str, Any],
    error: Exception,
) -> Exception | None:
    """The error as JAX raises it for the step itself: in ours, the function that is
    traced and its arguments are the library's. None for what is no error of a tracer,
    or none of the step."""
    if not isinstance(error, _TRACERS):
        return None
    try:
        jax.eval_shape(step, *args, **named)
    except Exception as own:  # another one if stored arrays, say, have other shapes
        return own if type(own) is type(error) else None
    return None


def _works(
    step: Callable[..., Any],
    args: Sequence[Any],
    named: Mapping[str, Any],
    axes: Axes,
    static: Python,
) -> bool:
    """Whether the step can be traced with the values of these arguments, and the others
    as arrays."""

    def with_static(args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        filled = [static.get(i, x) for i, x in enumerate(args)]
        return step(*filled, **{k: static.get(k, x) for k, x in named.items()})

    try:
        leaves, treedef = leaves_of((tuple(args), dict(named)), "argument")
    except ShardingError:  # the error is an earlier one
        return False
    avals = jax.tree.unflatten(treedef, [leaf.aval for leaf in leaves])
    return trace_once(with_static, avals, axes) is not None


def _refuse(step: Callable[..., Any], static: Python, error: Exception) -> None:
    names = dict(enumerate(parameter_names(step)))
    bound = [f"{names.get(p, p)}={x!r}" for p, x in static.items()]  # pyright: ignore
    place = last_line(error)
    at = "" if place == UNKNOWN else f"  at {place}\n"
    raise ShardingError(
        f"{step_name()} asks for the value of an argument while it is traced, and all "
        "arguments are arrays then.\n"
        f"{at}{called()}"
        "Bind what is known before, and shard one step for each value: fully_shard("
        f"functools.partial({step_name()}, {', '.join(bound)}), ...)."
    ) from error
