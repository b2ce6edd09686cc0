"""The rules of rows that are asked of the devices that own them.

In: an equation of `read_owned_p` or `add_owned_p`. Out: its rule: the rows of the table
are split, and with them the dimension that has an element for each block of them.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from shardfn._core.op_sharding_rule import Dim, OpShardingRule
from shardfn._core.owned_rows import (
    add_owned_p,
    add_to_block,
    read_block,
    read_owned_p,
)
from shardfn._core.rule_registry import LocalOp, register_rule
from shardfn.rules._factors import fresh_names, shape_of, take


def _read_local(op: LocalOp, *operands: jax.Array) -> Sequence[Any]:
    table, asked = operands
    return [read_block(table, asked, op.start(op.rule.owned))]


def _add_local(op: LocalOp, *operands: jax.Array) -> Sequence[Any]:
    table, asked, updates = operands
    start, params = op.start(op.rule.owned), op.eqn.params
    return [add_to_block(table, asked, updates, start, **params)]


@register_rule(read_owned_p, local=_read_local)
def _read_owned(eqn: JaxprEqn) -> OpShardingRule:
    """`a b, a c d -> a c d b  whole={c, d}`; `a` are rows in the first operand, and
    blocks of them elsewhere."""
    table, asked = _dims(eqn)
    return _owned(eqn, (table, asked), (*asked, *table[1:]), asked)


@register_rule(add_owned_p, local=_add_local)
def _add_owned(eqn: JaxprEqn) -> OpShardingRule:
    """`a b, a c d, a c d b -> a b  whole={c, d}`, with `a` as above."""
    table, asked = _dims(eqn)
    return _owned(eqn, (table, asked, (*asked, *table[1:])), table, asked)


def _dims(eqn: JaxprEqn) -> tuple[tuple[Dim, ...], tuple[Dim, ...]]:
    """The factors of the table, and of what is asked of each block of its rows."""
    names = fresh_names()
    table = tuple((f,) for f in take(names, len(shape_of(eqn))))
    others = take(names, len(shape_of(eqn, 1)) - 1)
    return table, (table[0], *((f,) for f in others))


def _owned(
    eqn: JaxprEqn,
    operands: tuple[tuple[Dim, ...], ...],
    result: tuple[Dim, ...],
    asked: tuple[Dim, ...],
) -> OpShardingRule:
    table, others = operands[0], asked[1:]
    sizes = [
        *zip(table, shape_of(eqn), strict=True),
        *zip(others, shape_of(eqn, 1)[1:], strict=True),
    ]
    ((rows,), *_) = table
    return OpShardingRule(
        operands,
        (result,),
        tuple((factor, size) for (factor,), size in sizes),
        whole=frozenset(factor for (factor,) in others),
        owned=rows,
    )
