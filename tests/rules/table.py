"""One line of a table of rules: an op, its operands, and all that its rule must be."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from completeness import needlessly_nonlinear, needlessly_whole, wrongly_linear
from harness import assert_every_factor_matches_unsharded, equation_of, integers

from shardfn._core.rule_registry import rule_of


@dataclasses.dataclass(frozen=True)
class Row:
    """`fn(*args)` makes one equation, whose rule prints as `expected`.

    Attributes:
      fn: the function.
      args: its arguments; a tuple stands for small integers of that shape.
      expected: the rule as text.
      linear: the groups of operands in which the op is linear.
      flat: whether the flattened operands may be split.
      name: which equation of `fn` is meant, if it makes several.
      needless: factors that are whole though splitting them happens to work.
      uncounted: operands in which the op is linear though the rule does not say so.
      rtol: how far blocks may be from the unsharded result.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    expected: str
    linear: tuple[set[int], ...] = ()
    flat: bool = False
    name: str | None = None
    needless: tuple[str, ...] = ()
    uncounted: tuple[int, ...] = ()
    rtol: float = 0

    def check(self) -> None:
        args = [
            integers(a, seed=i) if isinstance(a, tuple) else a
            for i, a in enumerate(self.args)
        ]
        eqn, values = equation_of(self.fn, *args, name=self.name)
        rule = rule_of(eqn)
        assert str(rule) == self.expected
        assert [set(group) for group in rule.linear] == list(self.linear)
        assert rule.flat == self.flat
        assert_every_factor_matches_unsharded(eqn, values, self.rtol)
        assert needlessly_whole(eqn, values) == list(self.needless)
        assert wrongly_linear(eqn, values, self.rtol) == []
        assert needlessly_nonlinear(eqn, values) == list(self.uncounted)


def table(*rows: Row) -> Any:
    """Parametrizes a test over `rows`, each under the text of its rule."""
    ids = [f"{i}: {row.name or ''} {row.expected}" for i, row in enumerate(rows)]
    return pytest.mark.parametrize("row", rows, ids=ids)
