"""How values of a program come from its arguments.

In: a program. Out: which dimensions are one and the same, such as the rows of a batch
and of what is computed from them; and which results are arguments that were updated in
place, element by element.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import jax.numpy as jnp

from shardfn._core.phases import BACKWARD
from shardfn._core.program import Atom, Node, Program, aval_of
from shardfn._core.regions import Region
from shardfn._trace.value_relations import relation_of

T = TypeVar("T", bound="Facts")

Dimension = tuple[int, int, int]
"""A dimension: number of the body it is in, value, dimension."""

_WRITES = ("dynamic_update_slice", "scatter")
_CHANGES = ("scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
_INTO_FIRST = (*_WRITES, *_CHANGES)
"""Operations that leave the elements of their first operand where they are."""
_MOVES = (*_WRITES, "select_n", "copy", "copy_p")
_OVER_DEVICES = ("psum", "psum_invariant", "pmax", "pmin")


class Facts(Protocol):
    """Sets of facts, which only grow."""

    def __or__(self, other: Any, /) -> Any: ...


def through_bodies(
    node: Node,
    operands: Sequence[T],
    run: Callable[[Program, Sequence[T]], Sequence[T]],
    nothing: T,
) -> list[T]:
    """What is known of the results of control flow, given what is of its operands.

    Args:
      node: the node.
      operands: a set per operand, or what can be joined by `|` like one.
      run: takes sets through a body, from its arguments to its results; the larger
        those are, the larger are these.
      nothing: the empty set.

    Returns:
      A set per result: of a loop's carries, what all of its iterations add to.
    """
    results = [nothing] * len(node.outputs)
    for body, region in zip(node.bodies, node.regions, strict=True):
        given = region.entering(operands)
        while True:
            made, joined = run(body, given), list(given)
            for j, i in region.loops:
                joined[i] = joined[i] | made[j]
            if joined == given:
                break
            given = joined
        for j, result in region.returned():
            results[result] = results[result] | made[j]
    return results


@dataclass(slots=True)
class Dimensions:
    """The dimensions of a program's values, in classes of those that are split
    together: the rules of its operations give them the same factor."""

    program: Program
    _parents: dict[Dimension, Dimension] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self._visit(self.program, next(self._numbers))

    def of(self, value: int) -> list[Dimension]:
        """The class of each dimension of a value of the program."""
        rank = len(getattr(aval_of(self.program, value), "shape", ()))
        return [self._find((0, value, dim)) for dim in range(rank)]

    def _find(self, place: Dimension) -> Dimension:
        while (parent := self._parents.get(place, place)) != place:
            self._parents[place] = self._parents.get(parent, parent)
            place = parent
        return place

    def _join(self, one: Dimension, other: Dimension) -> None:
        self._parents[self._find(one)] = self._find(other)

    def _visit(self, program: Program, number: int) -> None:
        for node in program.nodes:
            if node.passes_through:
                for atom, value in zip(node.inputs, node.outputs, strict=False):
                    self._alike(program, (number, atom), (number, value))
            elif node.rule is not None:
                self._by_rule(node, number)
            for body, region in zip(node.bodies, node.regions, strict=True):
                self._region(node, body, region, number)

    def _by_rule(self, node: Node, number: int) -> None:
        assert node.rule is not None
        seen: dict[str, Dimension] = {}
        sides = zip(
            (*node.inputs, *node.outputs),
            (*node.rule.operands, *node.rule.results),
            strict=True,
        )
        for atom, dims in sides:
            if not isinstance(atom, int):
                continue
            for dim, factors in enumerate(dims):
                if factors:
                    place = number, atom, dim
                    self._join(place, seen.setdefault(factors[0], place))

    def _region(self, node: Node, body: Program, region: Region, number: int) -> None:
        inner, operands = next(self._numbers), region.entering(node.inputs)
        for i, (atom, value) in enumerate(zip(operands, body.inputs, strict=True)):
            by = int(i in region.slices)
            self._alike(body, (inner, value), (number, atom), by)
        for j, result in region.returned():
            by, outside = int(j in region.stacks), node.outputs[result]
            self._alike(body, (inner, body.outputs[j]), (number, outside), by)
        for j, i in region.loops:
            self._alike(body, (inner, body.outputs[j]), (inner, body.inputs[i]))
        self._visit(body, inner)

    def _alike(
        self,
        program: Program,
        one: tuple[int, Atom],
        other: tuple[int, Atom],
        by: int = 0,
    ) -> None:
        """Joins the dimensions of two values; those of `one`, a value of `program`, are
        `by` further in the other."""
        if not isinstance(one[1], int) or not isinstance(other[1], int):
            return
        rank = len(getattr(aval_of(program, one[1]), "shape", ()))
        for dim in range(rank):
            self._join((*one, dim), (*other, dim + by))  # pyright: ignore


@dataclass(frozen=True, slots=True)
class Update:
    """What a value was, element by element, before it was updated; each a set of
    arguments, as the bits of an integer.

    Attributes:
      of: arguments that it was computed from by operations that keep each element where
        it is.
      same: those of which elements are still there.
      written: those of `same` that something was written into.
      gradient: whether a backward pass made it, or something that it was computed from
        in that way; with `of` it is a step down a gradient, say.
      moved: arguments of which it has elements, or what became of them, also in other
        places: transposed, cut or joined.
    """

    of: int = 0
    same: int = 0
    written: int = 0
    gradient: bool = False
    moved: int = 0

    @property
    def updated(self) -> int:
        """Arguments of which this may be the new value: computed from them in place, or
        a step down a gradient from what they were, wherever that is done."""
        return self.of | (self.moved if self.gradient else 0)

    def __or__(self, other: "Update") -> "Update":
        return Update(
            self.of | other.of,
            self.same | other.same,
            self.written | other.written,
            self.gradient or other.gradient,
            self.moved | other.moved,
        )


NOTHING = Update()
GRADIENT = Update(gradient=True)


def updates(program: Program) -> list[Update]:
    """What each output of a program updates; bit `i` stands for argument `i`.

    What a backward pass makes is a gradient, also where it adds a penalty's `2 w`.
    """
    bits = (1 << i for i in range(len(program.inputs)))
    given = [Update(bit, bit, moved=bit) for bit in bits]
    return _updates(program, given)


def _updates(program: Program, given: Sequence[Update]) -> list[Update]:
    known = dict(zip(program.inputs, given, strict=True))

    def read(atom: Atom | None) -> Update:
        return known.get(atom, NOTHING) if isinstance(atom, int) else NOTHING

    for node in program.nodes:
        ins = [read(atom) for atom in node.inputs]
        if BACKWARD in node.derivatives:
            results = [GRADIENT] * len(node.outputs)
        elif node.bodies:
            results = through_bodies(node, ins, _updates, NOTHING)
        elif not any(update != NOTHING for update in ins):
            continue
        elif node.passes_through or _is_over_devices(node):
            results = [*ins[: len(node.outputs)]]
        else:
            results = [_through_op(node, ins, j) for j in range(len(node.outputs))]
        known.update(zip(node.outputs, results, strict=True))
    return [read(atom) for atom in program.outputs]


def _through_op(node: Node, ins: Sequence[Update], result: int) -> Update:
    """What a result of an operation updates: the operands whose dimensions are, one by
    one, its own."""
    name, rule = node.eqn.primitive.name, node.rule
    made: Any = node.eqn.outvars[result].aval
    if rule is None or jnp.issubdtype(getattr(made, "dtype", bool), jnp.bool_):
        return NOTHING
    found = NOTHING
    for i, update in enumerate(ins):
        if _holds(node, i, result):
            found |= Update(gradient=update.gradient, moved=update.moved)
    into_first = name in _INTO_FIRST
    if rule.shifts or (rule.whole and not into_first):  # elements change places
        return found
    moves = name in _MOVES
    for i, update in enumerate(ins):
        if rule.operands[i] != rule.results[result] or into_first and i:
            continue
        same = update.same if moves else 0
        written = update.written & same
        if name in _WRITES:
            written = same
        found |= Update(update.of, same, written)
    return found


def dependences(program: Program) -> list[int]:
    """What each output of a program is computed from, in whatever way; bit `i` stands
    for argument `i`."""
    known = {value: 1 << i for i, value in enumerate(program.inputs)}
    for node in program.nodes:
        read = (known.get(atom, 0) for atom in node.inputs if isinstance(atom, int))
        known.update(
            dict.fromkeys(node.outputs, functools.reduce(operator.or_, read, 0))
        )
    return [
        known.get(atom, 0) if isinstance(atom, int) else 0 for atom in program.outputs
    ]


def _holds(node: Node, operand: int, result: int) -> bool:
    """Whether a result holds an operand's elements, changed each or in other places."""
    rule = node.rule
    is_each = rule is not None and rule.operands[operand] == rule.results[result]
    return is_each or relation_of(node, operand, result) is not None


def _is_over_devices(node: Node) -> bool:
    return node.rule is None and node.eqn.primitive.name in _OVER_DEVICES
