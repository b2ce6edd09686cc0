"""Rows that are rolled by an amount that only the running step knows.

In: the equations of a program in order. Out: for a window as large as an array, cut out
of two copies of it one behind the other, as `jnp.roll` makes it, and for its gradient,
the same as shifts by 1, 2, 4, ... rows, each taken or not. Devices that split the rows
then pass them on and need not have all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from shardfn._core import compat
from shardfn._core.index_bounds import clamped
from shardfn._core.program import Atom, number_of
from shardfn._core.shift import shift
from shardfn._trace.row_shifts import Pieces, shaped

Rewritten = tuple[Any, tuple[Atom, ...]]


def cuts_of_two(eqn: JaxprEqn) -> bool:
    """Whether an equation cuts half out of a dimension, at a place that is not
    known."""
    if eqn.primitive.name != "dynamic_slice":
        return False
    return _halved(shaped(eqn.invars[0]).shape, eqn.params["slice_sizes"]) is not None


def _halved(shape: Sequence[int], part: Sequence[int]) -> int | None:
    """The one dimension in which two shapes differ, if one has half of the other."""
    pairs = enumerate(zip(shape, part, strict=True))
    differ = [(dim, n, m) for dim, (n, m) in pairs if n != m]
    if len(differ) != 1 or differ[0][1] != 2 * differ[0][2]:
        return None
    return differ[0][0]


@dataclass(slots=True)
class Rolls:
    """What is known of the values of one program: which are two copies of another, or
    another put between zeros of its size.

    Attributes:
      pieces: the values that are pieces of others.
      doubled: values of which there are two, and along which dimension.
      placed: values put somewhere into zeros of twice their size, along which
        dimension and where.
    """

    pieces: Pieces
    doubled: dict[int, tuple[int, int]] = field(default_factory=dict)
    placed: dict[int, tuple[int, int, Atom]] = field(default_factory=dict)

    def equation(
        self,
        eqn: JaxprEqn,
        operands: Sequence[Atom],
        result: int,
        zeros: Sequence[bool],
    ) -> None:
        """Notes what an equation makes."""
        if eqn.primitive.name == "concatenate" and len(operands) == 2:
            if isinstance(operands[0], int) and operands[0] == operands[1]:
                self.doubled[result] = operands[0], eqn.params["dimension"]
        elif eqn.primitive.name == "dynamic_update_slice" and zeros[0]:
            whole, part = (shaped(v).shape for v in eqn.invars[:2])
            dim, update = _halved(whole, part), operands[1]
            if dim is not None and isinstance(update, int):
                self.placed[result] = update, dim, operands[2 + dim]

    def source(self, eqn: JaxprEqn, operands: Sequence[Atom]) -> tuple[int, int] | None:
        """Which value an equation rolls, and along which dimension, if it does."""
        if eqn.primitive.name == "dynamic_slice":
            found = self.doubled.get(number_of(operands[0]))
            sizes = eqn.params["slice_sizes"]
            whole = found and self.pieces.avals[found[0]][0] == tuple(sizes)
            return found if whole else None
        found = self._put_together(eqn, operands)
        return None if found is None else found[:2]

    def rolled(self, eqn: JaxprEqn, operands: Sequence[Atom]) -> Rewritten | None:
        """A jaxpr that does what `eqn` does by shifts, and its operands."""
        found = self.source(eqn, operands)
        if found is None:
            return None
        value, dim = found
        put = self._put_together(eqn, operands)
        start = operands[1 + dim] if put is None else put[2]
        aval = self.pieces.avals[value]
        if not isinstance(aval[1], np.dtype):
            return None

        def run(*given: jax.Array) -> jax.Array:
            x, place = given if isinstance(start, int) else (given[0], start.val)
            amount = clamped(jnp.asarray(place), aval[0][dim])
            if put is None:
                return _roll(x, dim, aval[0][dim] - amount)
            return _roll(x, dim, amount) + jnp.zeros((), aval[1])  # -0.0 + 0.0 is 0.0

        atoms = (value, start) if isinstance(start, int) else (value,)
        avals = [jax.ShapeDtypeStruct(*self.pieces.avals[atom]) for atom in atoms]
        with compat.as_user_code(eqn):
            return jax.make_jaxpr(run)(*avals), atoms

    def _put_together(
        self, eqn: JaxprEqn, operands: Sequence[Atom]
    ) -> tuple[int, int, Atom] | None:
        """What was put between zeros, if both halves of the result are added."""
        if eqn.primitive not in compat.ADDITIONS or len(operands) != 2:
            return None
        one, other = (self.pieces.known.get(number_of(atom)) for atom in operands)
        if one is None or other is None or one.source is None:
            return None
        placed = self.placed.get(one.source)
        alike = (one.source, one.dim, one.size) == (other.source, other.dim, other.size)
        if placed is None or not alike or one.dim != placed[1]:
            return None
        return placed if {one.start, other.start} == {0, one.size} else None


def _roll(x: jax.Array, dim: int, amount: jax.Array) -> jax.Array:
    """`x` with its rows moved on by up to all of them, around the end."""
    for bit in range((x.shape[dim]).bit_length()):
        taken = (amount >> bit) & 1 == 1
        x = lax.select_n(taken, x, shift(x, dim, 2**bit))
    return x
