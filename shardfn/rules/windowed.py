"""The rule of windows that slide over split rows.

In: an equation of `windowed_p`. Out: the rule of the operation in it, with the rows of
its operand and of its result one factor.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from shardfn._core import compat
from shardfn._core.op_sharding_rule import OpShardingRule
from shardfn._core.rule_registry import LocalOp, register_rule, rule_of
from shardfn._core.windowed import (
    operation,
    run_on,
    which_window,
    windowed_p,
    with_edges,
)


def _rows(eqn: JaxprEqn) -> tuple[int, int]:
    """Along which dimensions of the operand and of the result the rows lie."""
    inner, dim = operation(eqn.params["window"]), eqn.params["dimension"]
    numbers = inner.params.get("dimension_numbers")
    if numbers is None:
        return dim, dim
    return dim, numbers.out_spec[2 + which_window(inner, dim)]


def _windowed_local(op: LocalOp, *operands: jax.Array) -> Sequence[Any]:
    params = op.eqn.params
    window, dim = params["window"], params["dimension"]
    (factor,) = op.rule.operands[0][dim]
    x, others = with_edges(
        compat.varying_alike(operands),
        dim,
        params["edges"],
        params["reducer"],
        op.start(factor),
        op.rule.size(factor),
    )
    return [run_on(window, x, others, which_window(operation(window), dim))]


@register_rule(windowed_p, local=_windowed_local)
def _windowed(eqn: JaxprEqn) -> OpShardingRule:
    """`a b, a b, a b -> a b` for windows along dimension 0 that reach both ways; blocks
    of `a` have as many rows as a window reaches, at least."""
    base = rule_of(operation(eqn.params["window"]))
    assert base is not None
    (dim, made), edges = _rows(eqn), eqn.params["edges"]
    (old,), (new,) = base.results[0][made], base.operands[0][dim]
    result = (*base.results[0][:made], (new,), *base.results[0][made + 1 :])
    more = sum(map(bool, edges))  # shifted arrays behind the first operand
    first = [*range(more + 1)]
    return replace(
        base,
        operands=(base.operands[0],) * (more + 1) + base.operands[1:],
        results=(result,),
        sizes=tuple((f, n) for f, n in base.sizes if f != old),
        whole=(base.whole - {old, new}) | ({"g"} & dict(base.sizes).keys()),
        linear=tuple(
            frozenset([*(first if 0 in group else []), *(i + more for i in group if i)])
            for group in base.linear
        ),
        blocks=((new, max(edges)),),
    )
