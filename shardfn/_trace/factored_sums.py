"""Takes out of loops what they do alike to every term of a gradient's sum.

In: a program whose values are named after leaves. Out: the program, in which a loop
sums the terms before they are multiplied with what is the same in each iteration, and
the sum is multiplied behind it: of a weight that a loop uses masked, normalized or
squashed, the gradient is one sum of terms, as that of a plain weight, and so one
reduce-scatter.
"""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from shardfn._core.compat import ADDITIONS
from shardfn._core.leaves import Names
from shardfn._core.program import VALUE, ZERO, Atom, Node, Program, live
from shardfn._trace.linear_terms import Terms, TermSource, is_constant, values_of
from shardfn._trace.term_sources import sources_of

WIDE = ("float32", "float64", "bfloat16")
"""Dtypes in which a sum does not overflow if terms are made smaller behind it."""


def sum_before_factors(program: Program) -> Program:
    """Sums gradients in loops before they are multiplied with what does not change.

    Args:
      program: the program, its values named.

    Returns:
      The program; the same one if no loop does that.
    """
    made = _Made(list(program.avals), list(program.leaves))
    for node in program.nodes:
        bodies = tuple(map(sum_before_factors, node.bodies))
        if any(a is not b for a, b in zip(bodies, node.bodies, strict=True)):
            node = replace(node, bodies=bodies)
        made.nodes += _summed(node, made) if node.kind == "scan" else [node]
    same = len(made.nodes) == len(program.nodes) and all(
        a is b for a, b in zip(made.nodes, program.nodes, strict=True)
    )
    return program if same else made.program(program)


@dataclass(slots=True)
class _Made:
    """A program while it is made: the avals and names of its values, and its nodes."""

    avals: list[Any]
    leaves: list[Names]
    nodes: list[Node] = field(default_factory=list)

    def new(self, body: Program, value: int) -> int:
        """A value like one of a body."""
        self.avals.append(body.avals[value])
        self.leaves.append(body.leaf(value))
        return len(self.avals) - 1

    def program(self, old: Program) -> Program:
        return replace(
            old,
            avals=tuple(self.avals),
            leaves=tuple(self.leaves),
            nodes=tuple(self.nodes),
        )


@dataclass(frozen=True, slots=True)
class _End:
    """A result of a body that is a term, or a carry to which terms are added.

    Attributes:
      result: which result of the body it is.
      at: which result of the body's node.
      terms: the terms.
      carry: what they are added to.
      adds: the additions, the first one to the carry.
    """

    result: int
    at: int
    terms: Terms
    carry: int = -1
    adds: tuple[Node, ...] = ()


def _summed(loop: Node, made: _Made) -> list[Node]:
    """A scan that sums before it multiplies, and what is then behind it."""
    (body,), (region,) = loop.bodies, loop.regions
    if not loop.times:  # or zeros would be multiplied with what may be infinite
        return [loop]
    found = (_sum_of(loop, *pair) for pair in region.loops)
    sums = [end for end in found if end is not None]
    given: dict[int, Atom] = {
        body.inputs[i]: atom
        for i in region.constants
        if isinstance(atom := loop.inputs[region.operands[i]], int)
    }
    same = given.keys()
    body = _out_of_remats(body, same, [end.terms for end in sums])
    sources = sources_of(body, same, [end.terms for end in sums])
    body, instead = _with_additions(body, sums, sources)
    loop, behind = _taken_out(loop, body, sums, sources, instead, given, made)
    return [loop, *behind]


def _sum_of(loop: Node, result: int, argument: int) -> _End | None:
    """What the body of a loop adds to a carry that is the sum of a gradient, and starts
    with zeros; None if it is not, or something else reads what is added to."""
    (body,), (region,) = loop.bodies, loop.regions
    carry, at = body.inputs[argument], region.results[result]
    aval = body.avals[carry]
    begins_with_zeros = loop.kinds[region.operands[argument]] == ZERO
    if at is None or not (begins_with_zeros and any(body.leaf(carry))):
        return None
    if aval.dtype.name not in WIDE:
        return None
    last, adds, terms = carry, list[Node](), list[int]()
    for node in body.nodes:
        if last not in node.inputs:
            continue
        others = [a for a in node.inputs if a != last]
        is_sum = node.kind == "op" and node.eqn.primitive in ADDITIONS
        if not is_sum or len(others) != 1 or not isinstance(others[0], int):
            return None
        adds.append(node)
        terms.append(others[0])
        (last,) = node.outputs
    sums = [carry, *(add.outputs[0] for add in adds)]
    reads = Counter(v for node in body.nodes for v in values_of(node))
    reads.update(v for v in body.outputs if isinstance(v, int))
    ends = [j for j, atom in enumerate(body.outputs) if atom == last]
    if not adds or ends != [result] or any(reads[v] != 1 for v in sums):
        return None
    return _End(result, at, Terms(tuple(terms), aval), carry, tuple(adds))


def _with_additions(
    body: Program, sums: Sequence[_End], sources: Sequence[TermSource | None]
) -> tuple[Program, list[int]]:
    """A body that adds up sources, and what it is to return for each sum: the source's
    sum, or the carry as it came, zeros that nobody reads, where that is another's."""
    inside = _Made(list(body.avals), list(body.leaves), list(body.nodes))
    instead: list[int] = []
    for k, (end, source) in enumerate(zip(sums, sources, strict=True)):
        instead.append(end.carry)
        own = source.value_of(k) if source is not None and source.nodes else None
        if own is not None:
            instead[k] = inside.new(body, end.carry)
            inside.leaves[instead[k]] = _names_of_all(body, sums, sources, k)
            operands, kinds = (end.carry, own), (VALUE, VALUE)
            add = replace(
                end.adds[0], inputs=operands, kinds=kinds, outputs=(instead[k],)
            )
            inside.nodes.append(add)
    return inside.program(body), instead


def _names_of_all(
    body: Program, sums: Sequence[_End], sources: Sequence[TermSource | None], at: int
) -> Names:
    """The leaves of all sums that are made of what is added up for one of them."""
    each = zip(sums, sources, strict=True)
    carries = [end.carry for end, source in each if source and at in source.carriers]
    return tuple(dict.fromkeys(name for v in carries for name in body.leaf(v)))


def _out_of_remats(body: Program, same: Set[int], sums: Sequence[Terms]) -> Program:
    """A body in which remats return what terms of sums are made of, and operations
    behind them make the terms."""
    avals = {value: terms.aval for terms in sums for value in terms.values}
    made = _Made(list(body.avals), list(body.leaves))
    for node in body.nodes:
        if node.kind != "remat" or avals.keys().isdisjoint(node.outputs):
            made.nodes.append(node)
            continue
        (inner,) = node.bodies
        ends = [
            _End(j, j, Terms((value,), avals[node.outputs[j]]))
            for j, value in enumerate(inner.outputs)
            if isinstance(value, int) and node.outputs[j] in avals
        ]
        pairs = zip(inner.inputs, node.inputs, strict=True)
        given = {v: atom for v, atom in pairs if isinstance(atom, int) and atom in same}
        sources = sources_of(inner, given.keys(), [end.terms for end in ends])
        instead = [
            _returned(*pair, j)
            for j, pair in enumerate(zip(ends, sources, strict=True))
        ]
        node, behind = _taken_out(node, inner, ends, sources, instead, given, made)
        made.nodes += [node, *behind]
    return made.program(body)


def _returned(end: _End, source: TermSource | None, at: int) -> int:
    """What a body returns in place of a term: what is made to terms behind it, or, as
    nobody reads it there, a value that another result is, too."""
    if source is None:
        return end.terms.values[0]
    own = source.value_of(at)
    return source.values[0] if own is None else own


def _taken_out(
    node: Node,
    body: Program,
    ends: Sequence[_End],
    sources: Sequence[TermSource | None],
    instead: Sequence[int],
    given: Mapping[int, Atom],
    made: _Made,
) -> tuple[Node, list[Node]]:
    """A node without the operations that make terms of sources.

    Args:
      node: the node.
      body: its body.
      ends: the results that are made of sources.
      sources: the source of each; None if it is to stay as it is.
      instead: the value of the body that is returned in place of each.
      given: of the values of the body that are the same each time, what they are
        outside.
      made: the program around it.

    Returns:
      The node, which returns these, and the operations behind it.
    """
    inside, outputs, behind = list(body.outputs), list(node.outputs), list[Node]()
    moved = list(zip(ends, sources, instead, strict=True))
    for end, source, value in moved:
        if source is not None and source.nodes:
            inside[end.result] = value
            outputs[end.at] = made.new(body, value)
    outside = dict(given)
    for source in sources:
        if source is not None and source.nodes:
            made_of = (outputs[ends[k].at] for k in source.carriers)
            outside.update(zip(source.values, made_of, strict=True))
    for end, source, _ in moved:
        if source is not None and source.nodes:
            *before, last = _operations(body, end, source, outside, made)
            behind += [*before, replace(last, outputs=(node.outputs[end.at],))]
            if len(end.terms.values) == 1:
                outside[end.terms.values[0]] = node.outputs[end.at]
    if not behind:
        return node, []
    nodes, constants = live(body.nodes, body.constants, inside)
    body = replace(body, nodes=nodes, constants=constants, outputs=tuple(inside))
    return replace(node, bodies=(body,), outputs=tuple(outputs)), behind


def _operations(
    body: Program, end: _End, source: TermSource, outside: dict[int, Atom], made: _Made
) -> list[Node]:
    """What makes the terms of a source, and adds up these, outside of the body, but for
    what is there: `outside` says what its values are there, and gets more of them. The
    last operation makes the result."""
    constants = {n.outputs[0]: n for n in body.nodes if is_constant(n)}
    nodes: list[Node] = []
    for node in source.nodes:
        if node.outputs[0] in outside and node is not source.nodes[-1]:
            continue
        here = [constants[v] for v in values_of(node) if v not in outside]
        for each in (*here, node):
            new = made.new(body, each.outputs[0])
            inputs = tuple(outside[a] if isinstance(a, int) else a for a in each.inputs)
            nodes.append(replace(each, inputs=inputs, outputs=(new,)))
            outside[each.outputs[0]] = new
    total, *others = (outside[term] for term in end.terms.values)
    for add, term in zip(end.adds[1:], others, strict=True):
        new = made.new(body, add.outputs[0])
        operands, kinds = (total, term), (VALUE, VALUE)
        nodes.append(replace(add, inputs=operands, kinds=kinds, outputs=(new,)))
        total = new
    return nodes
