"""Prefix sums over rows of the batch, and prefix products and extrema.

In: an equation, and along which dimensions rows lie. Out: for one that runs over all
rows, the same in blocks, one for each device: within a block, and then with what all
blocks before it come to, one row of each, which is all that devices have to send.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from shardfn._core import compat
from shardfn._core.neutral import neutral
from shardfn._core.program import Atom
from shardfn._trace.row_shifts import shaped

Rewritten = tuple[Any, tuple[Atom, ...]]
Combine = Callable[[jax.Array, jax.Array], jax.Array]

PREFIXES: dict[str, tuple[Combine, str]] = {
    "cumsum": (lax.add, "sum"),
    "cumprod": (lax.mul, "prod"),
    "cummax": (lax.max, "max"),
    "cummin": (lax.min, "min"),
    "cumlogsumexp": (jnp.logaddexp, "max"),
}
"""What each combines two prefixes by, and the reducer with the same neutral value."""


def runs_over(eqn: JaxprEqn) -> bool:
    """Whether an equation makes prefixes of something."""
    return eqn.primitive.name in PREFIXES


def by_blocks(
    eqn: JaxprEqn,
    operands: Sequence[Atom],
    devices: int,
    is_rows: Callable[[int], bool],
) -> Rewritten | None:
    """A jaxpr that does what `eqn` does in blocks, and its operands.

    Args:
      eqn: an equation.
      operands: its operands.
      devices: how many may split the rows.
      is_rows: whether rows of the batch lie along a dimension of the operand.

    Returns:
      None if it makes no prefixes over rows, if devices do not divide these or have
      one each, or if they divide rows along another dimension already; and of complex
      numbers for all but sums and products.
    """
    if not runs_over(eqn) or devices < 2 or not isinstance(operands[0], int):
        return None
    given = shaped(eqn.invars[0])
    shape, dim, reverse = given.shape, eqn.params["axis"], eqn.params["reverse"]
    rows = shape[dim]
    if not is_rows(dim) or rows % devices or rows == devices:
        return None
    others = (d for d in range(len(shape)) if d != dim and is_rows(d))
    if any(shape[d] % devices == 0 for d in others):
        return None
    if not isinstance(given.dtype, np.dtype):
        return None
    combine, reducer = PREFIXES[eqn.primitive.name]
    is_complex = jnp.issubdtype(given.dtype, jnp.complexfloating)
    if is_complex and reducer in ("max", "min"):
        return None

    def prefixes(x: jax.Array, axis: int) -> jax.Array:
        return eqn.primitive.bind(x, **{**eqn.params, "axis": axis})

    def run(x: jax.Array) -> jax.Array:
        blocks = (*shape[:dim], devices, rows // devices, *shape[dim + 1 :])
        within = prefixes(lax.reshape(x, blocks), dim + 1)
        last = 0 if reverse else rows // devices - 1
        totals = lax.index_in_dim(within, last, dim + 1, keepdims=False)
        ends = (-1, 1, 0) if reverse else (1, -1, 0)
        config = [ends if d == dim else (0, 0, 0) for d in range(len(shape))]
        first = neutral(reducer, x.dtype)
        before = lax.pad(prefixes(totals, dim), first, config)
        return lax.reshape(combine(lax.expand_dims(before, [dim + 1]), within), shape)

    with compat.as_user_code(eqn):
        return jax.make_jaxpr(run)(given), (operands[0],)
