"""`windowed_p`: windows that slide over the rows of an array, one result per row.

In: the array, the same shifted by so many rows as windows reach before and after their
own, and what else the operation takes; the operation itself, on whole rows. Out: its
result. Of the shifted arrays only the rows at the edges count: those that a device
which has a block of the rows lacks. No user binds it: programs are rewritten to it.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import mlir

from shardfn._core.neutral import neutral
from shardfn._core.shift import shift

windowed_p = Primitive("windowed")


def operation(window: Any) -> JaxprEqn:
    """The operation, an equation on whole rows."""
    (eqn,) = window.jaxpr.eqns
    return eqn


@windowed_p.def_abstract_eval
def _aval(*_: Any, window: Any, **params: Any) -> Any:
    del params
    return operation(window).outvars[0].aval


def windowed(
    x: jax.Array,
    others: Sequence[jax.Array],
    window: Any,
    dimension: int,
    edges: tuple[int, int],
    reducer: str,
) -> jax.Array:
    """Windows over `x`, as one equation.

    Args:
      x: the array.
      others: other operands of the operation.
      window: the closed jaxpr of the operation alone.
      dimension: along which dimension of `x` windows slide.
      edges: how many rows before its own, and after it, a window reaches.
      reducer: what elements are combined by: beyond the ends lies what does not count.
    """
    before, after = edges
    shifted = [shift(x, dimension, n) for n in (before, -after) if n]
    return windowed_p.bind(
        x,
        *shifted,
        *others,
        window=window,
        dimension=dimension,
        edges=edges,
        reducer=reducer,
    )


def with_edges(
    operands: Sequence[jax.Array],
    dimension: int,
    edges: tuple[int, int],
    reducer: str,
    start: jax.Array | int,
    rows: int,
) -> tuple[jax.Array, Sequence[jax.Array]]:
    """Rows with those in front and behind that windows reach, and other operands.

    Args:
      operands: of `windowed_p`: blocks of rows, if these are split.
      dimension: of the rows.
      edges: how many rows to put in front and behind.
      reducer: what elements are combined by: beyond the ends lies what does not count.
      start: where the block begins.
      rows: of the whole array.
    """
    x, *rest = operands
    (before, after), size = edges, x.shape[dimension]
    beyond, parts = neutral(reducer, x.dtype), [x]
    if before:
        front = lax.slice_in_dim(rest.pop(0), 0, before, axis=dimension)
        parts.insert(0, jnp.where(jnp.asarray(start) > 0, front, beyond))
    if after:
        back = lax.slice_in_dim(rest.pop(0), size - after, size, axis=dimension)
        parts.append(jnp.where(jnp.asarray(start) + size < rows, back, beyond))
    return lax.concatenate(parts, dimension), rest


def run_on(window: Any, x: jax.Array, others: Sequence[jax.Array], at: int) -> Any:
    """The operation on rows that have their edges: `at` is which of its windows slides
    over them."""
    eqn = operation(window)
    padding = list(eqn.params["padding"])
    padding[at] = (0, 0)
    return eqn.primitive.bind(x, *others, **{**eqn.params, "padding": tuple(padding)})


def which_window(eqn: JaxprEqn, dimension: int) -> int:
    """Which of an operation's windows slides over a dimension of its first operand."""
    numbers = eqn.params.get("dimension_numbers")
    return dimension if numbers is None else numbers.lhs_spec[2:].index(dimension)


def _whole(
    *operands: jax.Array, window: Any, dimension: int, edges: Any, reducer: str
) -> Any:
    rows = operands[0].shape[dimension]
    x, others = with_edges(operands, dimension, edges, reducer, 0, rows)
    return run_on(window, x, others, which_window(operation(window), dimension))


windowed_p.def_impl(_whole)
mlir.register_lowering(windowed_p, mlir.lower_fun(_whole, multiple_results=False))
