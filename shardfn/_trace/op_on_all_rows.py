"""One equation on all rows of the batch, in place of most of them.

In: an equation, its rule, and where the pieces of rows among its operands begin. Out:
the equation on all rows, and the piece of each result.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from shardfn._core.neutral import neutral
from shardfn._core.op_sharding_rule import OpShardingRule
from shardfn._core.rule_registry import LocalOp, run_local
from shardfn._core.shift import shift
from shardfn._trace.row_shifts import Pieces, RowPiece, shaped


class DependsOnPlace(Exception):
    """What an op does to a row depends on where it lies."""


@dataclass(frozen=True, slots=True)
class OnAllRows(LocalOp):
    """An equation on all rows: as one device would run it that has them all, but that
    does not know where they begin."""

    factor: str = ""
    rows: int = 0

    def size(self, factor: str) -> int:
        return self.rows if factor == self.factor else self.rule.size(factor)

    def start(self, factor: str) -> int:
        if factor == self.factor:
            raise DependsOnPlace
        return 0


@dataclass(frozen=True, slots=True)
class Site:
    """An equation with pieces of rows among its operands.

    Attributes:
      eqn: the equation.
      rule: its rule.
      factor: the factor of its rows.
      rows: how many there are in all.
      start: where the piece begins, after others are shifted onto it.
    """

    eqn: JaxprEqn
    rule: OpShardingRule
    factor: str
    rows: int
    start: int

    @property
    def size(self) -> int:
        """Rows of the piece."""
        return self.rule.size(self.factor)

    @property
    def operand_dims(self) -> list[int | None]:
        """Along which dimension of each operand the rows lie."""
        return [self.rule.dim_of(dims, self.factor) for dims in self.rule.operands]

    @property
    def result_dims(self) -> list[int | None]:
        return [self.rule.dim_of(dims, self.factor) for dims in self.rule.results]

    def run(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """The equation on all rows, and the piece of each result."""
        avals = map(shaped, self.eqn.outvars)
        shapes = tuple(
            tuple(self.rows if d == dim else n for d, n in enumerate(aval.shape))
            for aval, dim in zip(avals, self.result_dims, strict=True)
        )
        parts = ((self.factor, (), 1),)
        op = OnAllRows(self.eqn, self.rule, parts, shapes, self.factor, self.rows)
        made = run_local(op, *operands)
        if tuple(x.shape for x in made) != shapes:
            raise DependsOnPlace
        return [x if dim is None else self.piece(x, dim) for x, dim in self.dims(made)]

    def dims(self, made: Sequence[jax.Array]) -> list[tuple[jax.Array, int | None]]:
        return list(zip(made, self.result_dims, strict=True))

    def piece(self, x: jax.Array, dim: int) -> jax.Array:
        return lax.slice_in_dim(x, self.start, self.start + self.size, axis=dim)

    def masked(self, x: jax.Array, dim: int) -> jax.Array:
        """`x` with only the piece counting, where rows are reduced."""
        reducer = self.rule.reducer(self.factor)
        if reducer is None:
            return x
        row = lax.broadcasted_iota(jnp.int32, x.shape, dim)
        inside = (row >= self.start) & (row < self.start + self.size)
        return lax.select(inside, x, lax.full(x.shape, neutral(reducer, x.dtype)))


def site_of(
    eqn: JaxprEqn, rule: OpShardingRule, windows: dict[int, RowPiece], pieces: Pieces
) -> Site | None:
    """Where the rows of the pieces are in `eqn`; None if they are in different places,
    or it needs more of them than one at a time."""
    dims = {i: rule.operands[i][w.dim] for i, w in windows.items()}
    factors = {f for dim in dims.values() for f in dim if rule.size(f) > 1}
    if len(factors) != 1 or rule.picks:
        return None
    (factor,) = factors
    everywhere = all(rule.dim_of(made, factor) is not None for made in rule.results)
    reduced = rule.reducer(factor) is not None
    if not (everywhere or reduced) or not rule.is_splittable(factor):
        return None
    if not rule.stands_alone(factor):
        return None
    i = min(windows)
    rows = pieces.like(windows[i]).shape[windows[i].dim]
    return Site(eqn, rule, factor, rows, min(w.start for w in windows.values()))


@dataclass(frozen=True, slots=True)
class RowOperand:
    """An operand of an equation on all rows.

    Attributes:
      atoms: the values that it is made of.
      avals: their shapes and dtypes.
      at: which operand it is, if it has rows.
      start: where the piece of the only value begins; None if it is no piece.
      broadcast: the equation that makes it of its values, if it is a broadcast.
    """

    atoms: tuple[Any, ...]
    avals: tuple[Any, ...]
    at: int | None = None
    start: int | None = None
    broadcast: JaxprEqn | None = None

    def grown(self, site: Site, values: Sequence[jax.Array]) -> jax.Array:
        """The operand with all rows."""
        dim = None if self.at is None else site.operand_dims[self.at]
        if dim is None:
            return values[0]
        if self.start is not None:
            x = shift(values[0], dim, site.start - self.start)
        elif self.broadcast is not None:
            shape = list(shaped(self.broadcast.outvars[0]).shape)
            shape[dim] = site.rows
            params = {**self.broadcast.params, "shape": tuple(shape)}
            x = self.broadcast.primitive.bind(*values, **params)
        else:
            x = _padded(values[0], dim, site)
        return site.masked(x, dim)


def _padded(x: jax.Array, dim: int, site: Site) -> jax.Array:
    ends = (site.start, site.rows - site.start - site.size, 0)
    config = [ends if d == dim else (0, 0, 0) for d in range(x.ndim)]
    return lax.pad(x, lax.full((), 0, x.dtype), config)
