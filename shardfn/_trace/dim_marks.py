"""Which dimensions of a program's values the rows of the batch lie along.

In: a program, and what lies along each dimension of its arguments. Out: the same for
all of its values, by the factors of op sharding rules; and whether a loop goes through
microbatches.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from shardfn._core.program import Atom, Node, Program
from shardfn._core.regions import Region

FREE, FIXED, ROWS = 0, 1, 2
"""Along a dimension lies nothing (it was made by a broadcast), something that is not
the batch, or rows of the batch."""

Marks = tuple[int, ...]
"""A mark per dimension."""


class Values(Protocol):
    """Numbered values, of a program or of one that is being built."""

    @property
    def avals(self) -> Sequence[Any]: ...


def has_rows(marks: Marks) -> bool:
    return ROWS in marks


@dataclass(slots=True, eq=False)
class Marking:
    """Marks of programs, remembered by program and marks of its arguments."""

    known: dict[tuple[int, tuple[Marks, ...]], dict[int, Marks]] = field(
        default_factory=dict
    )
    keep_alive: list[Program] = field(default_factory=list)

    def values(self, program: Program, inputs: Sequence[Marks]) -> dict[int, Marks]:
        """The marks of every value of a program."""
        key = id(program), tuple(inputs)
        if key not in self.known:
            self.keep_alive.append(program)
            marks = dict(zip(program.inputs, inputs, strict=True))
            for value, _ in program.constants:
                marks[value] = (FIXED,) * _rank(program, value)
            for node in program.nodes:
                operands = marks_of(program, node, marks)
                results = self.results(program, node, operands)
                marks.update(zip(node.outputs, results, strict=True))
            self.known[key] = marks
        return self.known[key]

    def results(
        self, program: Values, node: Node, operands: Sequence[Marks]
    ) -> list[Marks]:
        """The marks of what a node makes."""
        if node.passes_through:
            return list(operands)
        if not node.bodies:
            ranks = [_rank(program, v) for v in node.outputs]
            return _of_op(node, operands, ranks)
        along = max((m[0] for m in node.sliced(operands)), default=FREE)
        made: list[list[Marks]] = [[] for _ in node.outputs]
        entering = self.entering(node, operands)
        for body, region, inputs in zip(
            node.bodies, node.regions, entering, strict=True
        ):
            marks = self.values(body, inputs)
            for j, result in region.returned():
                inner = _read(body, body.outputs[j], marks)
                is_stack = j in region.stacks
                made[result].append((along, *inner) if is_stack else inner)
        return list(map(_joined, made))

    def entering(
        self, node: Node, operands: Sequence[Marks]
    ) -> list[tuple[Marks, ...]]:
        """The marks of the arguments of each body of a node.

        What a loop carries is marked by all of its iterations: marks only grow, so that
        this ends.
        """
        given = list(operands)
        for body, region in zip(node.bodies, node.regions, strict=True):
            before = None
            while region.loops and given != before:
                before = list(given)
                marks = self.values(body, _inside(region, given))
                for j, i in region.loops:
                    made = _read(body, body.outputs[j], marks)
                    carry = region.operands[i]
                    given[carry] = _joined((given[carry], made))
        return [_inside(region, given) for region in node.regions]

    def is_microbatch_loop(self, node: Node, operands: Sequence[Marks]) -> bool:
        """Whether a node is a scan whose iterations have rows of their own to split.

        It is if a slice of what it goes through still has rows along a dimension: the
        batch was reshaped for the loop. Or if what it carries is sums, and along the
        first dimension of every slice the body does the same to each row with weights
        that are the same for all: then the batch was given so.
        """
        scanned = node.sliced(operands)
        if not any(m[0] == ROWS for m in scanned):
            return False
        if any(m[0] == ROWS and has_rows(m[1:]) for m in scanned):
            return True
        (region,) = node.regions
        if not region.carries:
            return False
        given = list(operands)
        for i in region.slices:
            mark, *rest = given[region.operands[i]]
            if mark == ROWS and rest:
                given[region.operands[i]] = (ROWS, ROWS, *rest[1:])
        (inner,) = self.entering(node, given)
        return self.is_rowwise(node.bodies[0], inner)

    def is_rowwise(self, body: Program, inputs: Sequence[Marks]) -> bool:
        """Whether a body does the same to each row, with weights somewhere."""
        meetings = list(self.meetings(body, inputs))
        return any(meetings) and None not in meetings

    def meetings(
        self, program: Program, inputs: Sequence[Marks]
    ) -> Iterator[bool | None]:
        """Per op on rows, whether it has weights, too; None if rows meet each other, or
        weights along the dimension that rows lie along."""
        marks = self.values(program, inputs)
        for node in program.nodes:
            operands = marks_of(program, node, marks)
            if node.bodies:
                for body, inner in zip(
                    node.bodies, self.entering(node, operands), strict=True
                ):
                    yield from self.meetings(body, inner)
            elif any(map(has_rows, operands)):
                made = [marks[v] for v in node.outputs]
                yield _meeting(node, operands, made)


def _inside(region: Region, operands: Sequence[Marks]) -> tuple[Marks, ...]:
    """The marks of a body's arguments, given those of its node's operands."""
    given = enumerate(region.entering(operands))
    return tuple(m[1:] if i in region.slices else m for i, m in given)


def marks_of(program: Values, node: Node, marks: dict[int, Marks]) -> list[Marks]:
    """The marks of the operands of a node."""
    return [_read(program, atom, marks) for atom in node.inputs]


def _read(program: Values, atom: Atom, marks: dict[int, Marks]) -> Marks:
    return marks[atom] if isinstance(atom, int) else (FREE,) * _rank(program, atom)


def _rank(program: Values, atom: Atom) -> int:
    aval = program.avals[atom] if isinstance(atom, int) else atom.aval
    return len(getattr(aval, "shape", ()))


def _joined(marks: Sequence[Marks]) -> Marks:
    return tuple(map(max, zip(*marks, strict=True)))


def _of_op(node: Node, operands: Sequence[Marks], ranks: Sequence[int]) -> list[Marks]:
    """The marks of the results of an op, by its rule. Of one that has none, rows may
    lie along any dimension."""
    rule = node.rule
    if rule is None:
        mark = max((m for marks in operands for m in marks), default=FREE)
        return [(mark,) * rank for rank in ranks]
    along = _factors(node, operands)
    made = {f for dims in rule.results for dim in dims for f in dim}
    # A dimension that is cut or joined gets another factor; one that two operands are
    # contracted over is gone.
    if sum(map(bool, rule.operands)) > 1:
        made |= {f for f, _ in rule.reduce}
    cut = max((m for f, m in along.items() if f not in made), default=FREE)
    return [
        tuple(max((along.get(f, cut) for f in dim), default=FREE) for dim in dims)
        for dims in rule.results
    ]


def _factors(node: Node, operands: Sequence[Marks]) -> dict[str, int]:
    """What lies along each factor of an op's operands."""
    assert node.rule is not None
    sizes, along = dict(node.rule.sizes), {}
    for dims, marks in zip(node.rule.operands, operands, strict=True):
        for dim, mark in zip(dims, marks, strict=True):
            for factor in dim:
                found = mark if sizes[factor] != 1 else FREE
                along[factor] = max(along.get(factor, FREE), found)
    return along


def _meeting(
    node: Node, operands: Sequence[Marks], made: Sequence[Marks]
) -> bool | None:
    if node.rule is None or any(m.count(ROWS) > 1 for m in (*operands, *made)):
        return None
    along = _factors(node, operands)
    meet = node.rule.whole | dict(node.rule.shifts).keys()
    if any(mark == ROWS and f in meet for f, mark in along.items()):
        return None
    weights = False
    for dims, marks in zip(node.rule.operands, operands, strict=True):
        for dim, mark in zip(dims, marks, strict=True):
            if mark == FIXED and any(along[f] == ROWS for f in dim):
                return None
        weights |= FIXED in marks and not has_rows(marks)
    return weights
