"""Arrays of as many rows of the batch each, one behind the other, such as two views.

In: an equation that joins them, or cuts one of them out of all, and along which
dimensions rows lie. Out: the same as a stack that is reshaped: devices then exchange
the blocks of rows that they have for blocks of all, or of each, and need not have all
rows of any.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from shardfn._core import compat
from shardfn._core.program import Atom
from shardfn._trace.row_shifts import cuts, shaped

Rewritten = tuple[Any, tuple[Atom, ...]]


def joins_alike(eqn: JaxprEqn) -> bool:
    """Whether an equation joins several arrays of one size along the dimension that
    rows mostly lie along, the first; all but one of them may be padding."""
    if eqn.primitive.name == "pad":
        return _padded(eqn) is not None
    if eqn.primitive.name != "concatenate" or eqn.params["dimension"] != 0:
        return False
    return len({shaped(var).shape[0] for var in eqn.invars}) == 1 < len(eqn.invars)


def _padded(eqn: JaxprEqn) -> tuple[int, int] | None:
    """How many arrays of the operand's size a padding puts in front of its rows and
    behind them; None if they are no whole ones, or other dimensions are padded."""
    (low, high, between), *others = eqn.params["padding_config"] or [(0, 0, 0)]
    size = shaped(eqn.invars[0]).shape[0] if shaped(eqn.invars[0]).shape else 0
    if size < 2 or between or min(low, high) < 0 or low + high == 0:
        return None
    whole = low % size == high % size == 0 and not any(map(any, others))
    return (low // size, high // size) if whole else None


def cuts_alike(eqn: JaxprEqn) -> bool:
    """Whether an equation cuts one of several arrays of one size out of the dimension
    that rows mostly lie along, the first, or all of them."""
    found = cuts(eqn)
    if not found or eqn.primitive.name == "pad":
        return False
    rows = shaped(eqn.invars[0]).shape[found[0][0]]
    return (
        all(
            dim == 0 and 1 < size < rows and rows % size == 0 and start % size == 0
            for dim, start, size in found
        )
        and len({size for _, _, size in found}) == 1
    )


def unstacked(
    eqn: JaxprEqn,
    operands: Sequence[Atom],
    devices: int,
    is_rows: Callable[[Atom], bool],
) -> Rewritten | None:
    """A jaxpr that cuts what `eqn` cuts out of a stack, and its operands.

    Args:
      eqn: an equation.
      operands: its operands.
      devices: how many may split the rows.
      is_rows: whether rows of the batch lie along the first dimension of a value.

    Returns:
      None if it does not cut one of several arrays of as many rows, or devices do not
      divide these, or have some of them whole.
    """
    if not cuts_alike(eqn) or devices < 2 or not is_rows(operands[0]):
        return None
    found, given = cuts(eqn), shaped(eqn.invars[0])
    size = found[0][2]
    whole = given.shape[0] // size % devices == 0
    if size % devices or whole or not isinstance(given.dtype, np.dtype):
        return None

    def run(x: jax.Array) -> list[jax.Array]:
        stack = lax.reshape(x, (x.shape[0] // size, size, *x.shape[1:]))
        return [
            lax.squeeze(lax.slice_in_dim(stack, i, i + 1), (0,))
            for i in (start // size for _, start, _ in found)
        ]

    with compat.as_user_code(eqn):
        return jax.make_jaxpr(run)(given), tuple(operands)


def stacked(
    eqn: JaxprEqn,
    operands: Sequence[Atom],
    devices: int,
    is_rows: Callable[[Atom], bool],
) -> Rewritten | None:
    """A jaxpr that does what `eqn` does by a stack, and its operands.

    Args:
      eqn: an equation.
      operands: its operands.
      devices: how many may split the rows.
      is_rows: whether rows of the batch lie along the first dimension of a value.

    Returns:
      None if it does not join arrays of as many rows each, or devices do not divide
      these.
    """
    joined = operands[:1] if eqn.primitive.name == "pad" else operands
    if not joins_alike(eqn) or devices < 2 or not all(map(is_rows, joined)):
        return None
    given, made = [shaped(var) for var in eqn.invars], shaped(eqn.outvars[0])
    if given[0].shape[0] % devices or not isinstance(made.dtype, np.dtype):
        return None

    def run(*arrays: jax.Array) -> jax.Array:
        if eqn.primitive.name == "pad" and (ends := _padded(eqn)):
            config = [(*ends, 0), *eqn.params["padding_config"]]
            config[1] = (0, 0, 0)
            stack = lax.pad(lax.expand_dims(arrays[0], (0,)), arrays[1], config)
        else:
            stack = lax.concatenate([lax.expand_dims(x, (0,)) for x in arrays], 0)
        return lax.reshape(stack, made.shape)

    with compat.as_user_code(eqn):
        return jax.make_jaxpr(run)(*given), tuple(operands)
