"""Windows that slide over rows of the batch: convolutions, and sums and extrema.

In: the equations of a program in order, and along which dimensions rows lie. Out: for
one that makes about one result per row, the same as one result for each row, which
devices that split them make of their own rows and those at the edges of others'.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from shardfn._core import compat
from shardfn._core.neutral import neutral
from shardfn._core.program import Atom, number_of
from shardfn._core.windowed import windowed
from shardfn._trace.row_shifts import Pieces, RowPiece, shaped, slice_rows

Rewritten = tuple[Any, tuple[Atom, ...]]

REDUCERS = {
    "conv_general_dilated": "sum",
    "reduce_window_sum": "sum",
    "reduce_window_max": "max",
    "reduce_window_min": "min",
}
"""Operations with windows, and what they combine the elements of one by."""


@dataclass(frozen=True, slots=True)
class Window:
    """A window that moves by one element.

    Attributes:
      dim: along which dimension of the operand.
      made: along which of the result.
      at: which window it is of the operation's.
      size: elements from its first to its last.
      low: padding in front.
    """

    dim: int
    made: int
    at: int
    size: int
    low: int


def windows_of(eqn: JaxprEqn) -> list[Window]:
    """The windows of an equation that move by one element, of several."""
    if eqn.primitive.name not in REDUCERS:
        return []
    params, rank = eqn.params, len(shaped(eqn.invars[0]).shape)
    if eqn.primitive.name == "conv_general_dilated":
        numbers, kernel = params["dimension_numbers"], shaped(eqn.invars[1]).shape
        dims, made = numbers.lhs_spec[2:], numbers.out_spec[2:]
        counts = [kernel[d] for d in numbers.rhs_spec[2:]]
        inside, apart = params["lhs_dilation"], params["rhs_dilation"]
    else:
        dims = made = range(rank)
        counts = params["window_dimensions"]
        inside, apart = params["base_dilation"], params["window_dilation"]
    sizes = [(n - 1) * d + 1 for n, d in zip(counts, apart, strict=True)]
    return [
        Window(dims[k], made[k], k, size, int(params["padding"][k][0]))
        for k, size in enumerate(sizes)
        if size > 1 and params["window_strides"][k] == inside[k] == 1
    ]


@dataclass(slots=True)
class Halos:
    """What is known of the values of one program: which are others between zeros.

    Attributes:
      pieces: the values that are pieces of others.
      devices: how many may split the rows: each lacks rows of its neighbours alone.
      padded: values put between zeros, along which dimension, and how many in front.
    """

    pieces: Pieces
    devices: int
    padded: dict[int, tuple[int, int, int]] = field(default_factory=dict)

    def equation(
        self,
        eqn: JaxprEqn,
        operands: Sequence[Atom],
        result: int,
        zeros: Sequence[bool],
    ) -> None:
        """Notes what an equation makes."""
        if eqn.primitive.name != "pad" or not zeros[1]:
            return
        config = [tuple(map(int, each)) for each in eqn.params["padding_config"]]
        changed = [(dim, each) for dim, each in enumerate(config) if any(each)]
        if len(changed) == 1 and isinstance(operands[0], int):
            dim, (low, high, between) = changed[0]
            if min(low, high) >= 0 and not between:
                self.padded[result] = operands[0], dim, low

    def on_all_rows(
        self,
        eqn: JaxprEqn,
        operands: Sequence[Atom],
        rows_of: Callable[[Atom, int], RowPiece | None],
    ) -> Rewritten | None:
        """A jaxpr that does what `eqn` does on all rows, and its operands; None if no
        window slides over rows. `rows_of` says which rows lie along a dimension of a
        value, if they are of the batch."""
        for window in windows_of(eqn):
            atom, low = operands[0], window.low
            found = self.padded.get(number_of(atom))
            is_sum = REDUCERS[eqn.primitive.name] == "sum"
            if found is not None and found[1] == window.dim and is_sum:
                atom, low = found[0], low + found[2]
            piece = rows_of(atom, window.dim)
            if piece is not None and all(isinstance(a, int) for a in operands):
                return self._rewritten(eqn, operands, window, piece, low - piece.start)
        return None

    def _rewritten(
        self,
        eqn: JaxprEqn,
        operands: Sequence[Atom],
        window: Window,
        piece: RowPiece,
        before: int,
    ) -> Rewritten | None:
        """`before` is how many rows of all in front of a result its window begins."""
        assert piece.source is not None
        given, dim, source = self.pieces.like(piece), window.dim, piece.source
        rows, made = given.shape[dim], shaped(eqn.outvars[0]).shape[window.made]
        after = window.size - 1 - before
        if min(before, after) < 0 or not rows < 2 * made <= 2 * rows:
            return None
        if rows % self.devices or max(before, after) > rows // self.devices:
            return None
        if not isinstance(given.dtype, np.dtype):
            return None
        padding = list(eqn.params["padding"])
        padding[window.at] = (before, after)
        params = {**eqn.params, "padding": tuple(padding)}
        rest = [shaped(var) for var in eqn.invars[1:]]
        reducer = REDUCERS[eqn.primitive.name]

        def run(x: jax.Array, *others: jax.Array) -> jax.Array:
            if piece.size < rows:
                row = lax.broadcasted_iota(jnp.int32, x.shape, dim)
                inside = (row >= piece.start) & (row < piece.start + piece.size)
                x = lax.select(inside, x, lax.full(x.shape, neutral(reducer, x.dtype)))
            whole = jax.make_jaxpr(lambda *xs: eqn.primitive.bind(*xs, **params))
            window_of = whole(given, *rest)
            out = windowed(x, others, window_of, dim, (before, after), reducer)
            return slice_rows(out, 0, made, window.made)

        with compat.as_user_code(eqn):
            atoms = (source, *operands[1:])
            return jax.make_jaxpr(run)(given, *rest), atoms
