"""The brute force itself: wrong and missing rules are found."""

import dataclasses

import pytest
from completeness import needlessly_nonlinear, needlessly_whole, wrongly_linear
from harness import assert_every_factor_matches_unsharded, equation_of, integers
from jax import lax

from shardfn._core import rule_registry

SUM = frozenset({0})


def broken(monkeypatch, fn, *args, **changes):
    """The equation of `fn`, whose rule has some fields replaced."""
    eqn, values = equation_of(fn, *args)
    entry = rule_registry._registry[eqn.primitive]
    wrong = dataclasses.replace(
        entry, rule=lambda e: dataclasses.replace(entry.rule(e), **changes)
    )
    monkeypatch.setitem(rule_registry._registry, eqn.primitive, wrong)
    return eqn, values


WRONG = [
    (lambda x: lax.cumsum(x, 1), {"whole": frozenset()}),
    (lambda x: x.sum(1), {"reduce": (("b", "max"),)}),
    (lambda x: lax.sort(x, dimension=1), {"whole": frozenset()}),
    (lambda x: lax.cumsum(x, 0), {"flat": True}),
]


@pytest.mark.parametrize("fn, changes", WRONG)
def test_a_wrong_rule_is_found(monkeypatch, fn, changes):
    eqn, values = broken(monkeypatch, fn, integers((8, 8)), **changes)
    with pytest.raises(AssertionError, match="over 4 devices gives"):
        assert_every_factor_matches_unsharded(eqn, values)


def test_a_factor_that_is_whole_for_nothing_is_found(monkeypatch):
    whole = frozenset({"a", "b"})
    eqn, values = broken(monkeypatch, lax.neg, integers((8, 4)), whole=whole)
    assert needlessly_whole(eqn, values) == ["a", "b"]
    eqn, values = broken(
        monkeypatch, lambda x: x.sum(1), integers((8, 4)), reduce=(), whole={"b"}
    )
    assert needlessly_whole(eqn, values) == ["b:sum"]


def test_wrong_and_missing_linearity_is_found(monkeypatch):
    eqn, values = broken(monkeypatch, lax.exp, integers((8,)), linear=(SUM,))
    assert wrongly_linear(eqn, values) == [SUM]
    eqn, values = broken(monkeypatch, lax.neg, integers((8,)), linear=())
    assert needlessly_nonlinear(eqn, values) == [0]
