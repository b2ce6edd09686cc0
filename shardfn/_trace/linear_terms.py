"""What the terms of a sum are made of, by operations that are linear in it.

In: a body, what is the same each time that it runs, and terms that are added up over
its runs. Out: values that could be added up in place of the terms, each with the
operations that make the terms of it, and as well the sum of the sum.
"""

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from typing import Any

from shardfn._core.program import ZERO, Node, Program


@dataclass(frozen=True, slots=True)
class Terms:
    """What is added to one sum each time that a body runs.

    Attributes:
      values: the terms.
      aval: of the sum.
    """

    values: tuple[int, ...]
    aval: Any


@dataclass(frozen=True, slots=True)
class TermSource:
    """What the terms of a sum are made of.

    Attributes:
      values: the values; one, but where others are added up for other sums anyway.
      nodes: the operations that make them, in order; none if it is the only term.
      carriers: for which sum each of the values is added up.
    """

    values: tuple[int, ...]
    nodes: tuple[Node, ...] = ()
    carriers: tuple[int, ...] = ()

    def value_of(self, carrier: int) -> int | None:
        """The value that is added up for a sum; None if none of these is."""
        each = zip(self.values, self.carriers, strict=True)
        return next((value for value, k in each if k == carrier), None)


def is_constant(node: Node) -> bool:
    """Whether a node makes one array of literals alone."""
    is_made = node.kind == "op" and len(node.outputs) == 1 and not node.eqn.effects
    return is_made and not values_of(node)


def values_of(node: Node) -> list[int]:
    """The operands of a node that are values."""
    return [atom for atom in node.inputs if isinstance(atom, int)]


def are_like(body: Program, values: Iterable[int], aval: Any) -> bool:
    made = [body.avals[value] for value in values]
    return all((a.shape, a.dtype) == (aval.shape, aval.dtype) for a in made)


def linear_sources(
    body: Program, fixed: Set[int], terms: Terms, others: Set[int] = frozenset()
) -> Iterator[TermSource]:
    """The values that all terms are made of, the last ones the furthest back: the only
    term itself, and those from which on they are multiplied with an array. What others
    are made of is not looked at."""
    ahead, nodes = set(terms.values), list[Node]()
    if len(terms.values) == 1 and ahead.isdisjoint(fixed):
        yield TermSource(terms.values)
    multiplies, ends = False, set(others)
    for node in reversed(body.nodes):
        if ahead <= ends:
            return
        if (ahead - ends).isdisjoint(node.outputs):
            continue
        changing = _changing(node, fixed)
        if changing is None or any(
            body.avals[v].dtype != terms.aval.dtype for v in changing
        ):
            ends.update(node.outputs)
            continue
        multiplies |= any(
            a in fixed and body.avals[a].size > 1 for a in values_of(node)
        )
        ahead = (ahead - set(node.outputs)) | changing
        nodes.append(node)
        if multiplies:
            yield TermSource(tuple(sorted(ahead)), tuple(reversed(nodes)))


def _changing(node: Node, fixed: Set[int]) -> set[int] | None:
    """The operands of a node that change from run to run; None if it is not linear in
    these together."""
    if node.kind != "op" or node.rule is None or node.rule.terms:
        return None
    if node.eqn.effects or len(node.outputs) != 1:
        return None
    at = {i for i, a in enumerate(node.inputs) if isinstance(a, int) and a not in fixed}
    zeros = {i for i, kind in enumerate(node.kinds) if kind == ZERO}
    linear = any(at <= group <= at | zeros for group in node.rule.linear)
    changing = {a for i in at if isinstance(a := node.inputs[i], int)}
    return changing if linear and changing else None
