"""What stays split between two leaves that stay, as between the two of an MLP.

In: a program, and in which ops leaves would split which factors. Out: the dimensions of
values that come from one such op and go to another, element by element or as a
dimension that ops in between leave as it is.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardfn._core.op_sharding_rule import OpShardingRule
from shardfn._core.program import Atom, Program

ValueDim = tuple[int, int]
"""A value, and one of its dimensions."""

Factors = Mapping[int, Sequence[str]]
"""By the number of a node, the factors that leaves split in it."""


def between_leaves(program: Program, factors: Factors) -> frozenset[ValueDim]:
    """The places that come from one of these ops and go to one."""
    made: set[ValueDim] = set()
    for i, node in enumerate(program.nodes):
        if node.rule is not None:
            found = _factors_at(node.rule, node.rule.operands, node.inputs, made)
            split = {*found, *factors.get(i, ())}
            made.update(_places(node.rule, node.rule.results, node.outputs, split))
    taken: set[ValueDim] = set()
    for i in reversed(range(len(program.nodes))):
        node = program.nodes[i]
        if node.rule is not None:
            found = _factors_at(node.rule, node.rule.results, node.outputs, taken)
            split = {*found, *factors.get(i, ())}
            taken.update(_places(node.rule, node.rule.operands, node.inputs, split))
    return frozenset(made & taken)


def _factors_at(
    rule: OpShardingRule, dims: Sequence[Any], atoms: Sequence[Atom], at: set[ValueDim]
) -> Iterator[str]:
    """The factors that stand in some places of an op's operands or results."""
    for each, atom in zip(dims, atoms, strict=True):
        if not isinstance(atom, int):
            continue
        for dim in range(len(each)):
            factor = rule.major(each, dim) if (atom, dim) in at else None
            if factor is not None:
                yield factor


def _places(
    rule: OpShardingRule, dims: Sequence[Any], atoms: Sequence[Atom], split: set[str]
) -> Iterator[ValueDim]:
    """Where factors stand in an op's operands or results."""
    for each, atom in zip(dims, atoms, strict=True):
        if not isinstance(atom, int):
            continue
        for factor in split:
            dim = rule.dim_of(each, factor)
            if dim is not None:
                yield atom, dim
