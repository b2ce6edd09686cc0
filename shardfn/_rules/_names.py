"""What the rule files share: fresh factor names, and the shapes of an equation."""

import itertools
from collections.abc import Iterable, Iterator

from jax.extend.core import JaxprEqn

from shardfn._rule import factor_names


def fresh_names() -> Iterator[str]:
    """Factor names without end: a, b, c, ..."""
    return (factor_names(1, start)[0] for start in itertools.count())


def take(names: Iterator[str], count: int) -> tuple[str, ...]:
    """The next `count` names."""
    return tuple(itertools.islice(names, count))


def shape_of(eqn: JaxprEqn, operand: int = 0) -> tuple[int, ...]:
    """The global shape of one operand."""
    return tuple(eqn.invars[operand].aval.shape)


def result_shape(eqn: JaxprEqn, result: int = 0) -> tuple[int, ...]:
    """The global shape of one result."""
    return tuple(eqn.outvars[result].aval.shape)


def unmatched(own: Iterable[str], *others: Iterable[str]) -> frozenset[str]:
    """The names in `own` that stand in none of `others`."""
    return frozenset(own).difference(*map(frozenset, others))
