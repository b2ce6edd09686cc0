"""What the terms of sums are made of, by operations that are linear in it.

In: a body, what is the same each time that it runs, and terms that are added up over
its runs. Out: for each sum the value to add up in place of its terms, and the
operations that make the terms of it, which could as well make the sum of the sum.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
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
      value: the value.
      nodes: the operations that make them, in order; none if it is the only term.
      carrier: for which sum it is added up.
    """

    value: int
    nodes: tuple[Node, ...] = ()
    carrier: int = 0


def sources_of(
    body: Program, same: Set[int], sums: Sequence[Terms]
) -> list[TermSource | None]:
    """The value to add up for each sum.

    It is the furthest back of those that are like the sum, if terms are multiplied with
    an array on the way; or one that is added up for another sum anyway.

    Args:
      body: the program that makes the terms.
      same: values that are the same each time that it runs.
      sums: what is added up.

    Returns:
      For each sum its source; None if there is none.
    """
    fixed = same | {node.outputs[0] for node in body.nodes if is_constant(node)}
    ways = [list(_sources(body, fixed, terms)) for terms in sums]
    own = [
        _furthest(s for s in sources if _is_like(body, s, terms.aval))
        for terms, sources in zip(sums, ways, strict=True)
    ]
    carriers = _carriers(own, range(len(sums)))
    apart = [
        k
        for k, source in enumerate(own)
        if source == _furthest(_carried(ways[k], carriers, source))
    ]
    carriers = _carriers(own, apart)
    chosen = [
        source if k in apart else _furthest(_carried(ways[k], carriers, source))
        for k, source in enumerate(own)
    ]
    return [
        source and replace(source, carrier=carriers.get(source.value, k))
        for k, source in enumerate(chosen)
    ]


def _carriers(own: Sequence[TermSource | None], sums: Iterable[int]) -> dict[int, int]:
    """For which of some sums each of their sources is added up: one that it is the only
    term of, if there is one."""
    found: dict[int, int] = {}
    for needs_it in (False, True):
        for k in sums:
            source = own[k]
            if source is not None and bool(source.nodes) is needs_it:
                found.setdefault(source.value, k)
    return found


def _carried(
    sources: Sequence[TermSource], carriers: Mapping[int, int], own: TermSource | None
) -> list[TermSource]:
    """The sources of a sum that are added up for some sum, or its own one."""
    return [s for s in sources if s.value in carriers or s is own]


def _furthest(sources: Iterable[TermSource]) -> TermSource | None:
    return max(sources, key=lambda s: len(s.nodes), default=None)


def is_constant(node: Node) -> bool:
    """Whether a node makes one array of literals alone."""
    is_made = node.kind == "op" and len(node.outputs) == 1 and not node.eqn.effects
    return is_made and not values_of(node)


def values_of(node: Node) -> list[int]:
    """The operands of a node that are values."""
    return [atom for atom in node.inputs if isinstance(atom, int)]


def _is_like(body: Program, source: TermSource, aval: Any) -> bool:
    made = body.avals[source.value]
    return (made.shape, made.dtype) == (aval.shape, aval.dtype)


def _sources(body: Program, fixed: Set[int], terms: Terms) -> Iterator[TermSource]:
    """The values that all terms are made of, the last one the furthest back: the only
    term itself, and those from which on they are multiplied with an array."""
    ahead, nodes = set(terms.values), list[Node]()
    if len(terms.values) == 1 and ahead.isdisjoint(fixed):
        yield TermSource(*terms.values)
    multiplies = False
    for node in reversed(body.nodes):
        if ahead.isdisjoint(node.outputs):
            continue
        changing = _changing(node, fixed)
        if changing is None:
            return
        if any(body.avals[v].dtype != terms.aval.dtype for v in changing):
            return
        multiplies |= any(
            a in fixed and body.avals[a].size > 1 for a in values_of(node)
        )
        ahead = (ahead - set(node.outputs)) | changing
        nodes.append(node)
        value, *others = ahead
        if multiplies and not others:
            yield TermSource(value, tuple(reversed(nodes)))


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
