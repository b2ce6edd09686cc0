"""Rows with several dimensions of features, none of which the devices divide.

In: an equation that takes rows of the batch in another order, such as images that are
mixed with others. Out: the same on rows with one dimension of features, if devices
divide that: they can then exchange rows for parts of all rows (`exchange_rows`).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from shardfn._core import compat
from shardfn._core.program import Atom
from shardfn._trace.row_shifts import shaped

Rewritten = tuple[Any, tuple[Atom, ...]]


SCATTERS = ("scatter", "scatter-add")


def orders_rows(eqn: JaxprEqn) -> bool:
    """Whether an equation takes rows with several dimensions of features in another
    order: by their numbers, or the last one first; or puts them back, or adds them."""
    name = eqn.primitive.name
    features = getattr(eqn.invars[0].aval, "shape", ())[1:] if eqn.invars else ()
    if not features[1:]:
        return False
    if name == "rev":
        return eqn.params["dimensions"] == (0,)
    if name == "gather":
        numbers, made = eqn.params["dimension_numbers"], eqn.outvars[0]
        return (
            not numbers.operand_batching_dims
            and numbers.collapsed_slice_dims == numbers.start_index_map == (0,)
            and tuple(eqn.params["slice_sizes"]) == (1, *features)
            and numbers.offset_dims == _last(shaped(made), len(features))
        )
    if name not in SCATTERS:
        return False
    numbers, updates = eqn.params["dimension_numbers"], shaped(eqn.invars[2])
    return (
        not numbers.operand_batching_dims
        and numbers.inserted_window_dims == (0,)
        and numbers.scatter_dims_to_operand_dims == (0,)
        and numbers.update_window_dims == _last(updates, len(features))
        and updates.shape[-len(features) :] == features
    )


def _last(aval: jax.ShapeDtypeStruct, count: int) -> tuple[int, ...]:
    """The last dimensions of an array."""
    return tuple(range(len(aval.shape)))[-count:]


def with_one_dimension(
    eqn: JaxprEqn,
    operands: Sequence[Atom],
    devices: int,
    is_rows: Callable[[Atom], bool],
) -> Rewritten | None:
    """A jaxpr that does what `eqn` does on rows with one dimension of features.

    Args:
      eqn: an equation.
      operands: its operands.
      devices: how many may split the rows.
      is_rows: whether rows of the batch lie along the first dimension of a value.

    Returns:
      The jaxpr and its operands; None if the equation orders no rows, or devices divide
      one of several dimensions, or not all together.
    """
    if not orders_rows(eqn) or devices < 2:
        return None
    if not is_rows(operands[2 if eqn.primitive.name in SCATTERS else 0]):
        return None
    given, made = [shaped(v) for v in eqn.invars], shaped(eqn.outvars[0])
    features = given[0].shape[1:]
    count = math.prod(features)
    divides = not any(n % devices == 0 for n in features) and count % devices == 0
    if not divides or not isinstance(made.dtype, np.dtype):
        return None

    def flat(x: jax.Array) -> jax.Array:
        return lax.reshape(x, (*x.shape[: -len(features)], count))

    def run(*arrays: jax.Array) -> jax.Array:
        x, *others = arrays
        params = dict(eqn.params)
        if eqn.primitive.name == "gather":
            params["slice_sizes"] = (1, count)
            params["dimension_numbers"] = lax.GatherDimensionNumbers(
                offset_dims=(len(made.shape) - len(features),),
                collapsed_slice_dims=(0,),
                start_index_map=(0,),
            )
        if eqn.primitive.name in SCATTERS:
            others = [others[0], flat(others[1])]
            params["dimension_numbers"] = lax.ScatterDimensionNumbers(
                update_window_dims=(others[1].ndim - 1,),
                inserted_window_dims=(0,),
                scatter_dims_to_operand_dims=(0,),
            )
        return lax.reshape(eqn.primitive.bind(flat(x), *others, **params), made.shape)

    with compat.as_user_code(eqn):
        return jax.make_jaxpr(run)(*given), tuple(operands)
