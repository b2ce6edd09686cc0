"""Rows cut out of an array and joined to one of its size again: shifts of its rows.

In: the equations of a program in order. Out: for a concatenation or padding of pieces
of arrays that are as large as its result, as `jnp.roll`, a pair of neighbours or their
gradients make, the same as shifts along that dimension, which may then be split.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from shardfn._core import compat
from shardfn._core.program import Atom
from shardfn._core.shift import shift


@dataclass(frozen=True, slots=True)
class RowPiece:
    """Rows `start` to `start + size` along `dim` of the value `source`; of None they
    are zeros."""

    source: int | None
    dim: int
    start: int
    size: int


@dataclass(slots=True)
class Pieces:
    """What is known of the values of one program: those that are pieces of another."""

    known: dict[int, RowPiece] = field(default_factory=dict)

    def equation(
        self, eqn: JaxprEqn, operands: Sequence[Atom], results: Sequence[int]
    ) -> None:
        """Notes the values that an equation makes."""
        if not operands or not isinstance(operands[0], int):
            return
        for result, cut in zip(results, cuts(eqn), strict=False):
            self.known[result] = self.of(operands[0], *cut)

    def of(self, source: int, dim: int, start: int, size: int) -> RowPiece:
        """A piece of `source`, which may be a piece along `dim` itself."""
        piece = self.known.get(source)
        if piece is None or piece.dim != dim:
            return RowPiece(source, dim, start, size)
        return RowPiece(piece.source, dim, piece.start + start, size)

    def shifted(
        self, eqn: JaxprEqn, operands: Sequence[Atom], zeros: Sequence[bool]
    ) -> tuple[Any, tuple[int, ...]] | None:
        """A jaxpr that does what `eqn` does by shifts, and its operands; None if it
        joins other things. `zeros` says which operands are known to be zero."""
        pieces = self.joined(eqn, operands, zeros)
        return join(pieces, eqn) if pieces and self.fit(pieces, eqn) else None

    def joined(
        self, eqn: JaxprEqn, operands: Sequence[Atom], zeros: Sequence[bool]
    ) -> list[RowPiece] | None:
        """The pieces that a concatenation or padding joins along one dimension, if it
        does nothing else."""
        if eqn.primitive.name == "concatenate":
            dim = eqn.params["dimension"]
            sizes = [shaped(v).shape[dim] for v in eqn.invars]
            parts = list(zip(operands, sizes, zeros, strict=True))
        elif eqn.primitive.name == "pad" and zeros[1]:
            changed = _changed(eqn.params["padding_config"])
            if changed is None:
                return None
            dim, (low, high, _) = changed
            if low < 0 or high < 0:
                return self.pushed(eqn, operands[0], dim, low, high)
            size = shaped(eqn.invars[0]).shape[dim]
            parts = [(None, low, True), (operands[0], size, False), (None, high, True)]
        else:
            return None
        pieces = [self.part(atom, dim, n, zero) for atom, n, zero in parts if n]
        if any(p is None for p in pieces):
            return None
        whole = [p for p in pieces if p is not None]
        return whole if any(p.source is not None for p in whole) else None

    def pushed(
        self, eqn: JaxprEqn, atom: Atom, dim: int, low: int, high: int
    ) -> list[RowPiece] | None:
        """The pieces of a padding that cuts off as many rows as it adds."""
        if low + high != 0 or not isinstance(atom, int) or atom in self.known:
            return None
        size, rows = shaped(eqn.outvars[0]).shape[dim], abs(low)
        if rows >= size:
            return None
        zeros = RowPiece(None, dim, 0, rows)
        kept = RowPiece(atom, dim, max(-low, 0), size - rows)
        return [zeros, kept] if low > 0 else [kept, zeros]

    def part(
        self, atom: Atom | None, dim: int, size: int, zero: bool
    ) -> RowPiece | None:
        if zero:
            return RowPiece(None, dim, 0, size)
        if not isinstance(atom, int):
            return None
        piece = self.known.get(atom)
        if piece is None or piece.dim != dim:
            piece = RowPiece(atom, dim, 0, size)  # all of it
        return piece

    def fit(self, pieces: Sequence[RowPiece], eqn: JaxprEqn, more: int = 0) -> bool:
        """Whether every source has the shape and dtype of the result, or `more`
        rows."""
        result = shaped(eqn.outvars[0])
        shape = list(result.shape)
        shape[pieces[0].dim] += more
        return all(
            p.source is None or self.avals[p.source] == (tuple(shape), result.dtype)
            for p in pieces
        )

    avals: dict[int, Any] = field(default_factory=dict)

    def like(self, piece: RowPiece) -> jax.ShapeDtypeStruct:
        """The shape and dtype of what a piece is cut out of."""
        assert piece.source is not None
        return jax.ShapeDtypeStruct(*self.avals[piece.source])

    def value(self, number: int, aval: Any) -> None:
        """Notes the shape and dtype of a value."""
        self.avals[number] = (getattr(aval, "shape", None), getattr(aval, "dtype", 0))


def join(
    pieces: Sequence[RowPiece], eqn: JaxprEqn, more: int = 0, before: int = 0
) -> tuple[Any, tuple[int, ...]]:
    """A jaxpr that makes the result of `eqn`, these pieces one after the other, by
    shifts of what they are cut out of, and its operands. That may have `more` rows,
    `before` of them in front of the result's."""
    dim, aval = pieces[0].dim, shaped(eqn.outvars[0])
    sources = tuple(sorted({p.source for p in pieces if p.source is not None}))
    size, shape = aval.shape[dim], list(aval.shape)
    shape[dim] += more
    whole = jax.ShapeDtypeStruct(tuple(shape), aval.dtype)
    first, last = (RowPiece(None, dim, 0, n) for n in (before, more - before))
    filled = [p for p in (first, *pieces, last) if p.size]

    def run(*values: Any) -> Any:
        of = dict(zip(sources, values, strict=True))
        joined = _join(filled, of, whole, dim)
        return slice_rows(joined, before, before + size, dim)

    with compat.as_user_code(eqn):
        return jax.make_jaxpr(run)(*[whole] * len(sources)), sources


def _join(
    pieces: Sequence[RowPiece], of: dict[int, jax.Array], aval: Any, dim: int
) -> jax.Array:
    """The pieces, one after the other: a shift for each, put in place by a select."""
    rows = lax.broadcasted_iota(jnp.int32, aval.shape, dim)
    out: jax.Array | None = None
    offset, last = 0, None
    for piece in pieces:
        moved = None
        if piece.source is not None:
            moved = piece.source, (offset - piece.start) % aval.shape[dim]
        if out is None or moved != last:
            if moved is None:
                value = lax.full(aval.shape, 0, aval.dtype)
            else:
                value = shift(of[moved[0]], dim, moved[1])
            out = value if out is None else lax.select(rows >= offset, value, out)
        offset, last = offset + piece.size, moved
    assert out is not None
    return out


def slice_rows(x: jax.Array, start: int, end: int, dim: int) -> jax.Array:
    """Rows `start` to `end` along `dim`; `x` itself if those are all."""
    if (start, end) == (0, x.shape[dim]):
        return x
    return lax.slice_in_dim(x, start, end, axis=dim)


def cuts(eqn: JaxprEqn) -> list[tuple[int, int, int]]:
    """Dimension, start and size of what each result is of the first operand, if they
    are pieces along one dimension."""
    if eqn.primitive.name not in ("slice", "split", "pad"):
        return []
    shape, params = shaped(eqn.invars[0]).shape, eqn.params
    if eqn.primitive.name == "slice":
        strides = params["strides"]
        if strides is not None and any(s != 1 for s in strides):
            return []
        ends = list(zip(params["start_indices"], params["limit_indices"], strict=True))
        cut = [d for d, end in enumerate(ends) if end != (0, shape[d])]
        if len(cut) != 1:
            return []
        start, end = map(int, ends[cut[0]])
        return [(cut[0], start, end - start)]
    if eqn.primitive.name == "split":
        sizes, dim = params["sizes"], params["axis"]
        return [(dim, sum(sizes[:i]), n) for i, n in enumerate(sizes)]
    changed = _changed(params["padding_config"])
    if changed is not None and max(changed[1]) == 0:
        dim, (low, high, _) = changed
        return [(dim, -low, shape[dim] + low + high)]
    return []


def _changed(config: Sequence[Sequence[int]]) -> tuple[int, tuple[int, ...]] | None:
    """The one dimension that a padding changes, and how, none in between."""
    ends = [tuple(map(int, each)) for each in config]
    found = [(d, each) for d, each in enumerate(ends) if any(each)]
    return found[0] if len(found) == 1 and not found[0][1][2] else None


def shaped(var: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a variable of a jaxpr."""
    return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)
