"""Arguments of a step by position, whatever way they were passed.

In: a step, and the arguments of a call. Out: the same by position, so that a call by
name finds what a call by position compiled; those that have to be named come last,
together.
"""

import contextlib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

from shardfn._core.call_arguments import Named, Position
from shardfn._core.errors import ShardingError, called, step_name, without_bound
from shardfn._core.state_names import StateNames


def parameter_names(step: Any) -> list[str]:
    """Names of the parameters of a function that arguments are passed to by position,
    as far as it names them."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):  # of some functions in C
        return []
    by_position = (inspect.Parameter.POSITIONAL_ONLY,)
    by_position += (inspect.Parameter.POSITIONAL_OR_KEYWORD,)
    return [p.name for p in parameters if p.kind in by_position]


def state_names(step: Any, positions: tuple[int, ...] | None) -> StateNames:
    """What is known of a step's states before it is called; `positions` are those that
    the user says are state."""
    return StateNames(tuple(parameter_names(step)), positions)


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


def taking_named(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step on arguments by position, those that have to be named last, together. What
    JAX says of a tracer names the function and the arguments that the user knows."""

    def run(*args: Any) -> Any:
        if args and isinstance(args[-1], Named):
            return step(*args[:-1], **args[-1])
        return step(*args)

    known: Any = run
    known.__wrapped__ = without_bound(step)
    with contextlib.suppress(TypeError, ValueError):  # of some functions in C
        known.__signature__ = inspect.signature(step)
    return run


def refuse_count(given: Collection[Position], states: Sequence[Position]) -> NoReturn:
    """Raises for a call that lacks one of the state's arguments."""
    count, last = len(given), max(map(str, states))
    raise ShardingError(
        f"{step_name()} was called with {count} argument{'s' * (count != 1)}, but "
        f"its state is argument {last} "
        f"(state_argnums={', '.join(map(str, states))}).\n{called()}"
        "Pass the state there, or give fully_shard its position."
    )
