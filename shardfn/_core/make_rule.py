"""Builds the op sharding rule of an equation.

In: the factors of its operands and results. Out: its `OpShardingRule`, checked against
the equation's shapes.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from shardfn._core.errors import where
from shardfn._core.op_sharding_rule import Dim, OpShardingRule

_OF_BOOLEANS = {"sum": "or", "max": "or", "prod": "and", "min": "and"}
"""What the other reducers are for booleans: all their collectives are these two."""


def make_rule(
    eqn: JaxprEqn,
    operands: Iterable[Sequence[str | Dim]],
    results: Iterable[Sequence[str | Dim]],
    *,
    sizes: Mapping[str, int] | None = None,
    reduce: Mapping[str, str] | Iterable[str] = (),
    whole: Iterable[str] = (),
    linear: str | Iterable[Iterable[int]] = (),
    flat: bool = False,
    picks: bool = False,
    shifts: Mapping[str, int] | None = None,
    groups: Mapping[str, int] | None = None,
    regroups: bool = False,
    terms: str = "",
) -> OpShardingRule:
    """Builds the rule of `eqn`, filling in factor sizes from its shapes.

    Args:
      eqn: the equation.
      operands: per operand and dimension, a factor, or factors from major to minor.
      results: the same for the results.
      sizes: sizes of factors that share a dimension with others.
      reduce: factors that the op sums over, or a mapping from factor to reducer. XLA
        sums booleans by "or"; of other reducers theirs are taken as well.
      whole: factors that must not be split.
      linear: "each" if the op is linear in every operand by itself, "all" if it is
        linear in all operands together, or the groups of operand positions. Groups
        whose dtypes cannot be summed, such as booleans and keys, are left out.
      flat: whether blocks of the flattened operands give blocks of flattened results.
      picks: whether `reduce` sums one term with zeros: bits then stay as they are.
      shifts: how many rows before its own the blocks of a factor have to begin.
      groups: the operand in which the sizes of groups along a factor are.
      regroups: whether the minor of two factors of a dimension may be split.
      terms: the factor that counts the terms of a sum, which waits for the op.

    Returns:
      The frozen rule.

    Raises:
      ValueError: the factors do not fit the shapes of `eqn`.
    """
    norm = [
        tuple(tuple((d,) if isinstance(d, str) else tuple(d) for d in v) for v in side)
        for side in (operands, results)
    ]
    known = _sizes(eqn, norm, sizes or {})
    pairs = reduce if isinstance(reduce, Mapping) else dict.fromkeys(reduce, "sum")
    if all(getattr(var.aval, "dtype", None) == jnp.bool_ for var in eqn.outvars):
        pairs = {f: _OF_BOOLEANS.get(reducer, reducer) for f, reducer in pairs.items()}
    return OpShardingRule(
        operands=norm[0],
        results=norm[1],
        sizes=tuple(known.items()),
        reduce=tuple(pairs.items()),
        whole=frozenset(whole),
        linear=tuple(g for g in _groups(linear, len(norm[0])) if _can_sum(eqn, g)),
        flat=flat,
        picks=picks,
        shifts=tuple((shifts or {}).items()),
        groups=tuple((groups or {}).items()),
        regroups=regroups,
        terms=terms,
    )


def _sizes(
    eqn: JaxprEqn, sides: Sequence[Sequence[tuple[Dim, ...]]], sizes: Mapping[str, int]
) -> dict[str, int]:
    """The size of each factor; raises if they do not fit the values of `eqn`."""
    known = dict(sizes)
    for side, values, what in zip(
        sides, (eqn.invars, eqn.outvars), ("operand", "result"), strict=True
    ):
        if len(side) != len(values):
            _misfit(eqn, f"{len(side)} {what}s, where it has {len(values)}")
        for i, (dims, var) in enumerate(zip(side, values, strict=True)):
            shape = getattr(var.aval, "shape", ())
            named = f"{_written(dims)} for {what} {i} of shape {shape}"
            if len(dims) != len(shape):
                _misfit(eqn, named)
            for dim, size in zip(dims, shape, strict=True):
                if len(dim) == 1:
                    known.setdefault(dim[0], size)
                if math.prod(known.get(f, 0) for f in dim) != size:
                    _misfit(eqn, f"{named}, with factors of size {known}")
    return known


def _written(dims: tuple[Dim, ...]) -> str:
    return f"({', '.join('*'.join(dim) for dim in dims)})"


def _misfit(eqn: JaxprEqn, what: str) -> NoReturn:
    raise ValueError(
        f"the rule of primitive '{eqn.primitive}' names {what}.\n  at {where(eqn)}\n"
        "A rule names one factor per dimension, or several whose sizes multiply to it, "
        "and a factor has one size everywhere: see make_rule."
    )


def _groups(linear: str | Iterable[Iterable[int]], count: int) -> list[frozenset[int]]:
    if linear == "each":
        return [frozenset([i]) for i in range(count)]
    if linear == "all":
        return [frozenset(range(count))] if count else []
    return [frozenset(group) for group in linear if not isinstance(group, str)]


def _can_sum(eqn: JaxprEqn, group: Iterable[int]) -> bool:
    """Whether sums of these operands are sums of the results, for their dtypes.

    Booleans and keys have no sum. Integers wrap around, at another bound when widened.
    """
    dtypes: set[Any] = {getattr(eqn.invars[i].aval, "dtype", None) for i in group}
    results: set[Any] = {getattr(var.aval, "dtype", None) for var in eqn.outvars}
    if None in dtypes | results:
        return False
    exact = any(jnp.issubdtype(dtype, jnp.integer) for dtype in dtypes)
    numbers = all(jnp.issubdtype(dtype, jnp.number) for dtype in dtypes | results)
    return numbers and (dtypes == results or not exact)
