"""What the rule files share.

In: an equation. Out: fresh factor names, and the shapes of its values."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from shardfn._core.op_sharding_rule import factor_names


def fresh_names() -> Iterator[str]:
    """Makes different factor names without end, for rules of any rank.

    Returns:
      An iterator: a, b, c, ...

    Example:
      >>> names = fresh_names()
      >>> next(names), next(names)
      ('a', 'b')
    """
    return (factor_names(1, start)[0] for start in itertools.count())


def take(names: Iterator[str], count: int) -> tuple[str, ...]:
    """The next `count` names."""
    return tuple(itertools.islice(names, count))


def shape_of(eqn: JaxprEqn, operand: int = 0) -> tuple[int, ...]:
    """The global shape of one operand."""
    return _array(eqn.invars[operand]).shape


def result_shape(eqn: JaxprEqn, result: int = 0) -> tuple[int, ...]:
    """The global shape of one result."""
    return _array(eqn.outvars[result]).shape


def dtype_of(eqn: JaxprEqn, operand: int = 0) -> Any:
    """The dtype of one operand."""
    return _array(eqn.invars[operand]).dtype


def result_dtype(eqn: JaxprEqn, result: int = 0) -> Any:
    """The dtype of one result."""
    return _array(eqn.outvars[result]).dtype


def operand_shapes(eqn: JaxprEqn) -> list[tuple[int, ...]]:
    """The global shapes of all operands."""
    return [shape_of(eqn, i) for i in range(len(eqn.invars))]


def result_shapes(eqn: JaxprEqn) -> list[tuple[int, ...]]:
    """The global shapes of all results."""
    return [result_shape(eqn, i) for i in range(len(eqn.outvars))]


def _array(atom: Any) -> jax.ShapeDtypeStruct:
    return atom.aval


def unmatched(own: Iterable[str], *others: Iterable[str]) -> frozenset[str]:
    """The names in `own` that stand in none of `others`."""
    return frozenset(own).difference(*map(frozenset, others))
