"""The table of operations while it is filled, and common ways to choose operands.

In: what an operation runs and how its operands are chosen. Out: `TABLE`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from builder import Builder, Chosen, Operation, Value, largest
from language import Type

TABLE: dict[str, Operation] = {}


def operation(
    choose: Callable[[Builder], Chosen],
    *,
    jumps: bool = False,
    exact: bool = False,
    growth: Callable[[Sequence[Value], Sequence[Type]], int] = largest,
    name: str = "",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds the decorated function to the table; see `Operation`."""

    def add(run: Callable[..., Any]) -> Callable[..., Any]:
        called = name or run.__name__
        TABLE[called] = Operation(called, run, choose, jumps, exact or jumps, growth)
        return run

    return add


def one(dtype: str = "f", ndim: int = 0, **params: Any) -> Callable[[Builder], Chosen]:
    return lambda b: ([b.pick(dtype, ndim)], params)


def one_exact(dtype: str = "f", ndim: int = 0) -> Callable[[Builder], Chosen]:
    return lambda b: ([b.exact(dtype, ndim)], {})


def two(
    dtype: str = "f", exact: bool = False
) -> Callable[[Builder], tuple[list[Value], dict[str, Any]]]:
    """Two values whose shapes broadcast; the second may be a new leaf."""

    def choose(b: Builder) -> tuple[list[Value], dict[str, Any]]:
        pick = b.exact if exact else b.pick
        x = pick(dtype)
        if dtype == "f" and x.ndim and not b.depth and b.integer(0, 3) == 0:
            return [x, b.param(*x.shape[b.axis(x) :])], {}
        return [x, pick(x.type.dtype, test=lambda y: fits(x.shape, y.shape))], {}

    return choose


def fits(*shapes: tuple[int, ...]) -> bool:
    try:
        return math.prod(jnp.broadcast_shapes(*shapes)) > 0
    except ValueError:
        return False


def along(
    dtype: str = "f", exact: bool = False, **others: Sequence[Any]
) -> Callable[[Builder], Chosen]:
    """A value and one of its dimensions."""

    def choose(b: Builder) -> Chosen:
        x = (b.exact if exact else b.pick)(dtype, 1)
        params = {"axis": b.axis(x)}
        return [x], params | {k: b.one_of(v) for k, v in others.items()}

    return choose


def over_some(dtype: str = "f", exact: bool = False) -> Callable[[Builder], Chosen]:
    """A value and some of its dimensions."""

    def choose(b: Builder) -> Chosen:
        x = (b.exact if exact else b.pick)(dtype, 1)
        axes = tuple(d for d in range(x.ndim) if b.boolean())
        return [x], {"axis": axes or None, "keepdims": b.boolean()}

    return choose
