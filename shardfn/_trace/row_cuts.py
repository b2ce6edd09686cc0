"""Rows cut out of what rows were cut out of, or joined to, before.

In: equations that slice, in the order of a program, and along which dimensions rows
lie. Out: for a slice of pieces that were joined, as of a batch with a first row put in
front, those pieces; for one of a sum, the sum of slices; for one of rows and columns at
once, one of each.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn

from shardfn._core import compat
from shardfn._core.op_sharding_rule import OpShardingRule
from shardfn._core.program import Atom
from shardfn._trace.row_shifts import Pieces, RowPiece, cuts, join, shaped, slice_rows

Rewritten = tuple[Any, tuple[Atom, ...]]
Cut = tuple[int, int, int]
"""Dimension, start and size."""


@dataclass(slots=True)
class RowCuts:
    """The values of one program that slices are taken out of.

    Attributes:
      pieces: the values that are pieces of others.
      joins: those that pieces are joined to.
      sums: those that are sums, or other functions linear in all operands, of such.
    """

    pieces: Pieces
    joins: dict[int, list[RowPiece]] = field(default_factory=dict)
    sums: dict[int, tuple[JaxprEqn, tuple[Atom, ...]]] = field(default_factory=dict)

    def equation(
        self,
        eqn: JaxprEqn,
        operands: tuple[Atom, ...],
        result: int,
        rule: OpShardingRule | None,
        zeros: Sequence[bool],
        rows: Sequence[bool],
    ) -> None:
        """Notes the value that an equation makes, which has `rows` along dimensions."""
        pieces = self.pieces.joined(eqn, operands, zeros)
        if pieces is not None and rows[pieces[0].dim]:
            self.joins[result] = pieces
        elif rule is not None and rule.flat and _is_sum(rule):
            arrays = zip(operands, map(shaped, eqn.invars), strict=True)
            if all(self.is_joined(atom) for atom, aval in arrays if aval.ndim):
                self.sums[result] = eqn, operands

    def is_joined(self, atom: Atom) -> bool:
        """Whether a value is made of pieces, or is a sum of such."""
        return isinstance(atom, int) and (atom in self.joins or atom in self.sums)

    def cut(self, eqn: JaxprEqn, atom: Atom) -> Rewritten | None:
        """What `eqn` cuts out of `atom`, if it is cut out of what that is made of."""
        found = cuts(eqn)
        if not isinstance(atom, int):
            return None
        if len(found) > 1 and self.is_joined(atom):
            return _each_cut(eqn, found), (atom,)
        if len(found) != 1:
            return None
        (cut,) = found
        if atom in self.joins:
            return self.of_pieces(eqn, self.joins[atom], cut)
        if atom in self.sums:
            return _of_each(eqn, *self.sums[atom], cut)
        piece = self.pieces.known.get(atom)
        if piece is None or piece.dim != cut[0]:
            return None
        return self.of_piece(eqn, self.pieces.of(atom, *cut))

    def of_piece(self, eqn: JaxprEqn, piece: RowPiece) -> Rewritten:
        """A slice of a whole value, or zeros."""
        aval = shaped(eqn.outvars[0])
        if piece.source is None:
            return _traced(eqn, lambda: lax.full(aval.shape, 0, aval.dtype), []), ()
        dim, start, end = piece.dim, piece.start, piece.start + piece.size
        whole = self.pieces.like(piece)

        def run(x: jax.Array) -> jax.Array:
            return slice_rows(x, start, end, dim)

        return _traced(eqn, run, [whole]), (piece.source,)

    def of_pieces(
        self, eqn: JaxprEqn, pieces: Sequence[RowPiece], cut: Cut
    ) -> Rewritten | None:
        """A slice of pieces that are joined: those of them that lie inside."""
        dim, start, size = cut
        if dim != pieces[0].dim:
            return None
        inside, at = [], 0
        for piece in pieces:
            low, high = max(start, at), min(start + size, at + piece.size)
            if low < high:
                first = piece.start + low - at
                inside.append(RowPiece(piece.source, dim, first, high - low))
            at += piece.size
        if len(inside) == 1:
            return self.of_piece(eqn, inside[0])
        return join(inside, eqn) if self.pieces.fit(inside, eqn) else None


def apart(eqn: JaxprEqn, is_apart: Callable[[int, int], bool]) -> Any:
    """A slice or padding of several dimensions as two, one of them of the dimension
    that is to be cut by itself; None if there is none.

    `is_apart` takes a dimension and the size of what is cut out of it.
    """
    if eqn.primitive.name == "slice":
        sizes = shaped(eqn.outvars[0]).shape
        strides = eqn.params["strides"]
        plain = strides is None or all(s == 1 for s in strides)
    elif eqn.primitive.name == "pad":
        sizes = shaped(eqn.invars[0]).shape
        plain = not any(interior for _, _, interior in eqn.params["padding_config"])
    else:
        return None
    shape, result = shaped(eqn.invars[0]).shape, shaped(eqn.outvars[0]).shape
    changed = [d for d, n in enumerate(shape) if n != result[d]]
    found = [d for d in changed if is_apart(d, sizes[d])]
    if not plain or len(changed) < 2 or not found:
        return None
    avals = [compat.abstract(v.aval) for v in eqn.invars]
    if eqn.primitive.name == "slice":
        return _traced(eqn, lambda x: _sliced_apart(eqn, x, found[0]), avals)
    return _traced(eqn, lambda x, fill: _padded_apart(eqn, x, fill, found[0]), avals)


def _sliced_apart(eqn: JaxprEqn, x: jax.Array, dim: int) -> jax.Array:
    """Other dimensions are sliced first."""
    starts, ends = (list(eqn.params[f"{k}_indices"]) for k in ("start", "limit"))
    start, end = starts[dim], ends[dim]
    starts[dim], ends[dim] = 0, x.shape[dim]
    return slice_rows(lax.slice(x, starts, ends), start, end, dim)


def _padded_apart(eqn: JaxprEqn, x: jax.Array, fill: jax.Array, dim: int) -> jax.Array:
    """Other dimensions are padded last."""
    config = eqn.params["padding_config"]
    none = [(0, 0, 0)] * x.ndim
    x = lax.pad(x, fill, [config[d] if d == dim else c for d, c in enumerate(none)])
    return lax.pad(x, fill, [c if d == dim else config[d] for d, c in enumerate(none)])


def _each_cut(eqn: JaxprEqn, found: Sequence[Cut]) -> Any:
    """The parts that an array is split into, one by one."""

    def run(x: jax.Array) -> list[jax.Array]:
        return [
            lax.slice_in_dim(x, start, start + size, axis=dim)
            for dim, start, size in found
        ]

    return _traced(eqn, run, [compat.abstract(eqn.invars[0].aval)])


def _of_each(
    eqn: JaxprEqn, made_by: JaxprEqn, operands: tuple[Atom, ...], cut: Cut
) -> Rewritten:
    """A slice of a sum: the sum of slices."""
    dim, start, size = cut

    def run(*values: jax.Array) -> Any:
        ends = [
            lax.slice_in_dim(x, start, start + size, axis=dim) if x.ndim else x
            for x in values
        ]
        return made_by.primitive.bind(*ends, **made_by.params)

    return _traced(
        eqn, run, [compat.abstract(v.aval) for v in made_by.invars]
    ), operands


def _is_sum(rule: OpShardingRule) -> bool:
    """Whether an op is elementwise, and linear in all operands together."""
    alike = all(dims in ((), rule.results[0]) for dims in rule.operands)
    linear = frozenset(range(len(rule.operands))) in rule.linear
    return linear and alike and not rule.reduce and not rule.whole and not rule.shifts


def _traced(eqn: JaxprEqn, run: Callable[..., Any], avals: Sequence[Any]) -> Any:
    with compat.as_user_code(eqn):
        return jax.make_jaxpr(run)(*avals)
