"""How a result of an op stands to one of its operands, dimension by dimension.

In: a node. Out: whether a result holds just what an operand holds, in the same or in
other places; or a part of it; or it and more.
"""

from shardfn._core.op_sharding_rule import Dim, OpShardingRule
from shardfn._core.program import Node

SAME, PART, WHOLE = "same", "part", "whole"
"""The result has the operand's dimensions; is a part of it, as a slice is; or has it as
a part, as what is joined of several."""


def relation_of(node: Node, operand: int, result: int) -> str | None:
    """How result `result` of a node stands to operand `operand`.

    Args:
      node: the node.
      operand: the operand's position.
      result: the result's.

    Returns:
      SAME, PART, WHOLE, or None if the dimensions of one are not those of the other.
    """
    if node.passes_through:
        return SAME if operand == result else None
    if node.kind != "op" or node.rule is None:
        return None
    rule = node.rule
    before, after = rule.operands[operand], rule.results[result]
    if before == after:
        return SAME
    sizes = dict(rule.sizes)
    lost, new = _factors(before, sizes), _factors(after, sizes)
    lost, new = lost - new, new - lost
    if not lost and not new:
        return SAME
    if not is_linear(node, operand):
        return None
    alone = not any(dims for i, dims in enumerate(rule.operands) if i != operand)
    if not new and lost <= rule.whole:
        return PART if alone else None  # one of the arrays that are unstacked
    if not lost and new <= rule.whole:
        return WHOLE
    if len(before) != len(after):
        return None
    changed = [(b, a) for b, a in zip(before, after, strict=True) if b != a]
    if not all(_is_cut(rule, *pair) for pair in changed):
        return None
    grows = [sizes[a[0]] > sizes[b[0]] for b, a in changed]
    if not any(grows):
        return PART if alone else None
    return WHOLE if all(grows) else None


def _is_cut(rule: OpShardingRule, before: Dim, after: Dim) -> bool:
    """Whether one of two dimensions is a stretch of the other."""
    if len(before) != 1 or len(after) != 1:
        return False
    return not rule.whole.isdisjoint((*before, *after))


def has_dimensions(node: Node, result: int) -> bool:
    """Whether a result of an op has more than one element, to tell it by."""
    rule = node.rule
    return rule is not None and bool(_factors(rule.results[result], dict(rule.sizes)))


def is_linear(node: Node, operand: int) -> bool:
    """Whether a node is linear in an operand, the others held fixed."""
    if node.passes_through:
        return True
    return node.rule is not None and any(operand in g for g in node.rule.linear)


def _factors(dims: tuple[Dim, ...], sizes: dict[str, int]) -> set[str]:
    return {f for dim in dims for f in dim if sizes[f] != 1}


def is_factor_of(node: Node, operand: int, result: int) -> bool:
    """Whether a result is a product of an operand and something else, with as many
    dimensions, some of them the operand's."""
    if node.kind != "op" or node.rule is None or not is_linear(node, operand):
        return False
    before, after = node.rule.operands[operand], node.rule.results[result]
    sizes = dict(node.rule.sizes)
    shared = _factors(before, sizes) & _factors(after, sizes)
    return len(before) == len(after) and bool(shared)
