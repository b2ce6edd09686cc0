"""`shift_p`: an array with the rows along one dimension moved on, and around the end.

In: `x`, a dimension of size `n` and `rows`. Out: row `r` of the result is row
`(r - rows) % n` of `x`. No user binds it: programs are rewritten to it where they cut
an array and join the pieces again, so that devices that split the dimension exchange
rows with their neighbours instead of gathering it.
"""

from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

shift_p = Primitive("shift")


@shift_p.def_abstract_eval
def _aval(x: Any, *, dimension: int, rows: int) -> Any:
    del dimension, rows
    return x


def shift(x: jax.Array, dimension: int, rows: int) -> jax.Array:
    """`x` shifted, as one equation; by the fewest rows, forward or backward."""
    size = x.shape[dimension]
    rows %= size
    rows -= size if 2 * rows > size else 0
    return shift_p.bind(x, dimension=dimension, rows=rows) if rows else x


def shifted_whole(x: jax.Array, *, dimension: int, rows: int) -> jax.Array:
    """The same where the dimension is whole."""
    size = x.shape[dimension]
    cut = -rows % size
    ends = (
        lax.slice_in_dim(x, cut, size, axis=dimension),
        lax.slice_in_dim(x, 0, cut, axis=dimension),
    )
    return lax.concatenate(ends, dimension)


shift_p.def_impl(shifted_whole)
mlir.register_lowering(shift_p, mlir.lower_fun(shifted_whole, multiple_results=False))
