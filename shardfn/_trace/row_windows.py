"""Most of the batch's rows, such as all but the first, and what is computed of them.

In: the equations of a program in order, and along which dimensions rows lie. Out: for
an equation on such pieces of the batch, as `x[1:] - x[:-1]` has them, the same on all
rows, pieces shifted onto each other. Devices divide all rows, so each goes on with its
own; where rows meet in a sum, those that are no part of the piece do not count.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn, jaxprs_in_params

from shardfn._core import compat
from shardfn._core.op_sharding_rule import OpShardingRule
from shardfn._core.program import Atom
from shardfn._trace.dim_marks import FIXED, ROWS, Marks
from shardfn._trace.op_on_all_rows import DependsOnPlace, RowOperand, Site, site_of
from shardfn._trace.row_cuts import RowCuts, apart
from shardfn._trace.row_features import has_no_split, with_one_dimension
from shardfn._trace.row_halos import Halos, windows_of
from shardfn._trace.row_joins import cuts_alike, joins_alike, stacked, unstacked
from shardfn._trace.row_prefixes import by_blocks, runs_over
from shardfn._trace.row_rolls import Rolls, cuts_of_two
from shardfn._trace.row_shifts import Pieces, RowPiece, cuts, join, shaped

Rewritten = tuple[Any, tuple[Atom, ...]]


def cuts_most(closed: Any, devices: int) -> bool:
    """Whether an equation of a jaxpr, or of one in it, cuts more than half out of a
    dimension, half of it that may be all rows of another, or a window at each row,
    makes prefixes, joins arrays of as many rows each or cuts them apart, or takes rows
    in another order that have no dimension for so many devices."""
    jaxpr, _ = compat.open_jaxpr(closed)
    return any(
        cuts_of_two(eqn)
        or joins_alike(eqn)
        or cuts_alike(eqn)
        or has_no_split(eqn, devices)
        or bool(windows_of(eqn))
        or runs_over(eqn)
        or any(_is_most(size, rows) for rows, size in _sizes(eqn))
        or any(cuts_most(inner, devices) for inner in jaxprs_in_params(eqn.params))
        for eqn in jaxpr.eqns
    )


def _sizes(eqn: JaxprEqn) -> list[tuple[int, int]]:
    """Sizes of the dimensions of what an equation cuts, before and after."""
    if eqn.primitive.name == "slice":
        return [
            *zip(shaped(eqn.invars[0]).shape, shaped(eqn.outvars[0]).shape, strict=True)
        ]
    found = cuts(eqn)
    shape = shaped(eqn.invars[0]).shape if found else ()
    return [(shape[dim], size) for dim, _, size in found]


def _is_most(size: int, rows: int) -> bool:
    """Whether to compute `rows` rows for the sake of `size` costs less than twice."""
    return size < rows < 2 * size


@dataclass(slots=True)
class Windows:
    """What is known of the values of one program: which are most rows of others.

    Attributes:
      pieces: the values that are pieces of others.
      marks: what lies along the dimensions of every value.
      devices: how many may split the rows.
      spread: values made by a broadcast, by the equation and its operands.
    """

    pieces: Pieces
    marks: dict[int, Marks] = field(default_factory=dict)
    devices: int = 1
    spread: dict[int, tuple[JaxprEqn, tuple[Atom, ...]]] = field(default_factory=dict)
    cuts: RowCuts = field(init=False)
    rolls: Rolls = field(init=False)
    halos: Halos = field(init=False)

    def __post_init__(self) -> None:
        self.cuts = RowCuts(self.pieces)
        self.rolls = Rolls(self.pieces)
        self.halos = Halos(self.pieces, self.devices)

    def equation(
        self,
        eqn: JaxprEqn,
        operands: tuple[Atom, ...],
        results: Sequence[int],
        rule: OpShardingRule | None,
        zeros: Sequence[bool],
    ) -> None:
        """Notes what an equation makes."""
        if eqn.primitive.name == "broadcast_in_dim":
            self.spread[results[0]] = eqn, operands
        if len(results) == 1:
            self.halos.equation(eqn, operands, results[0], zeros)
        self.joins(eqn, operands, results, rule, zeros)

    def joins(
        self,
        eqn: JaxprEqn,
        operands: tuple[Atom, ...],
        results: Sequence[int],
        rule: OpShardingRule | None,
        zeros: Sequence[bool],
    ) -> None:
        """Notes what an equation joins, also if it has been rewritten."""
        if len(results) == 1:
            self.rolls.equation(eqn, operands, results[0], zeros)
        rows = [mark == ROWS for mark in self.marks[results[0]]] if results else ()
        if len(results) == 1 and any(rows):
            self.cuts.equation(eqn, operands, results[0], rule, zeros, rows)

    def constant(self, value: int, array: Any) -> None:
        """Notes an array that the traced function captured."""
        self.marks[value] = (FIXED,) * len(getattr(array, "shape", ()))

    def window(self, atom: Atom) -> RowPiece | None:
        """The piece of rows that a value is, if it is most of them."""
        piece = self.pieces.known.get(atom) if isinstance(atom, int) else None
        if piece is None or piece.source is None or self.cuts.is_joined(piece.source):
            return None
        return piece if self.is_window(piece.source, piece.dim, piece.size) else None

    def rows_of(self, atom: Atom, dim: int) -> RowPiece | None:
        """Which rows of the batch lie along a dimension of a value: a piece of another,
        or all of its own; None if they are of something else."""
        piece = self.window(atom)
        if piece is not None and piece.dim == dim:
            return piece
        if not isinstance(atom, int) or self.marks[atom][dim] != ROWS:
            return None
        return RowPiece(atom, dim, 0, self.pieces.avals[atom][0][dim])

    def has_rows(self, atom: Atom) -> bool:
        """Whether a value has rows of the batch along its first dimension, and is no
        piece of them."""
        marks = self.marks[atom] if isinstance(atom, int) else ()
        return marks[:1] == (ROWS,) and self.window(atom) is None

    def is_window(self, value: int, dim: int, size: int) -> bool:
        """Whether so many along a dimension of a value are most of its rows."""
        shape, _ = self.pieces.avals[value]
        return self.marks[value][dim] == ROWS and _is_most(size, shape[dim])

    def on_all_rows(
        self,
        eqn: JaxprEqn,
        operands: Sequence[Atom],
        rule: OpShardingRule | None,
        zeros: Sequence[bool],
    ) -> Rewritten | None:
        """A jaxpr that does what `eqn` does on all rows, and its operands; None if it
        has no piece of rows, or what it does depends on where a row lies."""

        def rows_along(dim: int) -> bool:
            piece = self.rows_of(operands[0], dim)
            return piece is not None and piece.source == operands[0]

        rolled = self.rolls.source(eqn, operands)
        if rolled is not None and self.marks[rolled[0]][rolled[1]] == ROWS:
            return self.rolls.rolled(eqn, operands)
        if slid := self.halos.on_all_rows(eqn, operands, self.rows_of):
            return slid
        if prefixes := by_blocks(eqn, operands, self.devices, rows_along):
            return prefixes
        if stack := stacked(eqn, operands, self.devices, self.has_rows):
            return stack
        if flat := with_one_dimension(eqn, operands, self.devices, self.has_rows):
            return flat
        first = operands[0] if operands else -1
        marks = self.marks.get(first, ()) if isinstance(first, int) else ()
        if ROWS in marks and any(marks[dim] == ROWS for dim, _, n in cuts(eqn) if n):
            cut = self.cuts.cut(eqn, first)
            return cut or unstacked(eqn, operands, self.devices, self.has_rows)
        if ROWS in marks:
            two = apart(eqn, lambda dim, size: marks[dim] == ROWS)
            if two is not None:
                return two, tuple(operands)
        windows = {i: w for i, a in enumerate(operands) if (w := self.window(a))}
        if not windows:
            return None
        if pieces := self.pieces.joined(eqn, operands, zeros):
            return self.joined(eqn, pieces, *windows.values())
        site = None if rule is None else site_of(eqn, rule, windows, self.pieces)
        given = None if site is None else self.given(site, operands)
        if site is None or given is None:
            return None
        atoms = tuple(atom for operand in given for atom in operand.atoms)
        avals = [aval for operand in given for aval in operand.avals]

        def run(*values: jax.Array) -> list[jax.Array]:
            left = list(values)
            grown = [
                operand.grown(site, [left.pop(0) for _ in operand.atoms])
                for operand in given
            ]
            return site.run(grown)

        try:
            with compat.as_user_code(eqn):
                return jax.make_jaxpr(run)(*avals), atoms
        except DependsOnPlace:
            return None

    def joined(
        self, eqn: JaxprEqn, pieces: Sequence[RowPiece], window: RowPiece, *_: RowPiece
    ) -> Rewritten | None:
        """Pieces that make fewer rows than there are, together."""
        dim = window.dim
        more = self.pieces.like(window).shape[dim] - shaped(eqn.outvars[0]).shape[dim]
        if more <= 0 or not self.pieces.fit(pieces, eqn, more):
            return None
        before = 0
        for piece in pieces:
            if piece.source is not None:  # it stays where it is, if there is room
                return join(pieces, eqn, more, min(max(piece.start - before, 0), more))
            before += piece.size
        return None

    def given(self, site: Site, operands: Sequence[Atom]) -> list[RowOperand] | None:
        """How each operand comes to have all rows; None if one has other rows."""
        out: list[RowOperand] = []
        for i, (atom, var) in enumerate(zip(operands, site.eqn.invars, strict=True)):
            dim, window = site.operand_dims[i], self.window(atom)
            if dim is None:
                out.append(RowOperand((atom,), (compat.abstract(var.aval),)))
            elif window is not None and window.dim == dim:
                if self.pieces.like(window).shape[dim] != site.rows:
                    return None
                aval = self.pieces.like(window)
                out.append(RowOperand((window.source,), (aval,), i, start=window.start))
            elif isinstance(atom, int) and self.marks[atom][dim] == ROWS:
                return None
            elif not isinstance(shaped(var).dtype, np.dtype):
                return None
            else:
                out.append(self.spread_over(site, i, atom))
        return out

    def spread_over(self, site: Site, i: int, atom: Atom) -> RowOperand:
        """An operand that is no piece of the batch: a broadcast is made larger."""
        found = self.spread.get(atom) if isinstance(atom, int) else None
        dim, aval = site.operand_dims[i], site.eqn.invars[i].aval
        if found is None or dim in _kept_dims(found[0]):
            return RowOperand((atom,), (compat.abstract(aval),), i)
        eqn, operands = found
        avals = tuple(compat.abstract(v.aval) for v in eqn.invars)
        return RowOperand(operands, avals, i, broadcast=eqn)


def _kept_dims(eqn: JaxprEqn) -> set[int]:
    """The dimensions of a broadcast that its operand has as they are."""
    shape, dims = shaped(eqn.invars[0]).shape, eqn.params["broadcast_dimensions"]
    return {d for n, d in zip(shape, dims, strict=True) if n != 1}
