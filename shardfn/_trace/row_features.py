"""Rows with dimensions of features that the devices do not divide.

In: an equation that takes rows of the batch in another order, such as images that are
mixed with others. Out: the same on rows with one dimension of features, if devices
divide that, or few zeros make it so: they can then exchange rows for parts of all rows
(`exchange_rows`).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from shardfn._core import compat
from shardfn._core.limits import PADDED_FEATURES
from shardfn._core.program import Atom
from shardfn._trace.row_shifts import shaped

Rewritten = tuple[Any, tuple[Atom, ...]]


SCATTERS = ("scatter", "scatter-add")


def orders_rows(eqn: JaxprEqn) -> bool:
    """Whether an equation takes rows with features in another order: by their numbers,
    or the last one first; or puts them back, or adds them."""
    name = eqn.primitive.name
    features = getattr(eqn.invars[0].aval, "shape", ())[1:] if eqn.invars else ()
    if not features:
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


def has_no_split(eqn: JaxprEqn, devices: int) -> bool:
    """Whether an equation orders rows whose features devices divide, but along none of
    their dimensions."""
    if devices < 2 or not orders_rows(eqn):
        return False
    features, count, padded = _features(eqn, devices)
    # Scatters may be the gradients of tables, which are no rows of the batch.
    most = count if eqn.primitive.name in SCATTERS else (1 + PADDED_FEATURES) * count
    if any(n % devices == 0 for n in features) or not 0 < padded <= most:
        return False
    return isinstance(shaped(eqn.outvars[0]).dtype, np.dtype)


def _features(eqn: JaxprEqn, devices: int) -> tuple[tuple[int, ...], int, int]:
    """The dimensions of the features of rows, how many they are, and how many with
    zeros that devices divide."""
    features = tuple(shaped(eqn.invars[0]).shape[1:])
    count = math.prod(features)
    return features, count, -(-count // devices) * devices


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
      one of their dimensions, or too many zeros would be needed for all together.
    """
    if not has_no_split(eqn, devices):
        return None
    if not is_rows(operands[2 if eqn.primitive.name in SCATTERS else 0]):
        return None
    given, made = [shaped(v) for v in eqn.invars], shaped(eqn.outvars[0])
    features, count, padded = _features(eqn, devices)

    def flat(x: jax.Array) -> jax.Array:
        x = lax.reshape(x, (*x.shape[: -len(features)], count))
        if padded == count:
            return x
        zeros = jnp.zeros((*x.shape[:-1], padded - count), x.dtype)
        return lax.concatenate([x, zeros], x.ndim - 1)

    def run(*arrays: jax.Array) -> jax.Array:
        x, *others = arrays
        params = dict(eqn.params)
        if eqn.primitive.name == "gather":
            params["slice_sizes"] = (1, padded)
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
        out = eqn.primitive.bind(flat(x), *others, **params)
        if padded != count:
            out = lax.slice_in_dim(out, 0, count, axis=out.ndim - 1)
        return lax.reshape(out, made.shape)

    with compat.as_user_code(eqn):
        return jax.make_jaxpr(run)(*given), tuple(operands)
