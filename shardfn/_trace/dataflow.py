"""How values of a program come from its arguments.

In: a program. Out: which dimensions are one and the same, such as the rows of a batch
and of what is computed from them; and which results are arguments that were updated in
place, element by element.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from shardfn._core.phases import BACKWARD
from shardfn._core.program import Atom, Node, Program, aval_of

Place = tuple[int, int, int]
"""A dimension: number of the body it is in, value, dimension."""

_WRITES = ("dynamic_update_slice", "scatter")
_MOVES = (*_WRITES, "select_n", "copy", "copy_p")
_OVER_DEVICES = ("psum", "psum_invariant", "pmax", "pmin")


@dataclass(frozen=True, slots=True)
class Region:
    """A body of control flow, seen from outside.

    Attributes:
      body: the body.
      inputs: what its arguments are outside.
      outputs: what its results are outside; None for one that stays inside.
      sliced: from which argument on they are rows of what is outside.
      stacked: from which result on they are rows of what is outside.
      loops: `(result, argument)` for all that the next iteration starts with.
    """

    body: Program
    inputs: tuple[Atom, ...]
    outputs: tuple[int | None, ...]
    sliced: int
    stacked: int
    loops: tuple[tuple[int, int], ...] = ()


def regions(node: Node) -> Iterator[Region]:
    """The bodies of a node."""
    ins, outs = node.inputs, node.outputs
    first, second = node.counts
    match node.kind:
        case "scan":
            start = first + second
            loops = tuple((j, first + j) for j in range(second))
            yield Region(node.bodies[0], ins, outs, start, second, loops)
        case "while":
            test, body = node.bodies
            carry, start = ins[first + second :], first + second
            loops = tuple((j, second + j) for j in range(len(carry)))
            stays = (None,) * len(test.outputs)
            yield Region(test, (*ins[:first], *carry), stays, len(ins), len(outs))
            yield Region(body, ins[first:], outs, len(ins), len(outs), loops)
            assert len(ins) - start == len(outs)
        case "cond":
            for body in node.bodies:
                yield Region(body, ins[1:], outs, len(ins), len(outs))
        case _:
            for body in node.bodies:
                yield Region(body, ins, outs, len(ins), len(outs))


@dataclass(slots=True)
class Dimensions:
    """The dimensions of a program's values, in classes of those that are split
    together: the rules of its operations give them the same factor."""

    program: Program
    _parents: dict[Place, Place] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self._visit(self.program, next(self._numbers))

    def of(self, value: int) -> list[Place]:
        """The class of each dimension of a value of the program."""
        rank = len(getattr(aval_of(self.program, value), "shape", ()))
        return [self._find((0, value, dim)) for dim in range(rank)]

    def _find(self, place: Place) -> Place:
        while (parent := self._parents.get(place, place)) != place:
            self._parents[place] = self._parents.get(parent, parent)
            place = parent
        return place

    def _join(self, one: Place, other: Place) -> None:
        self._parents[self._find(one)] = self._find(other)

    def _visit(self, program: Program, number: int) -> None:
        for node in program.nodes:
            if node.kind in ("barrier", "constrain"):
                for atom, value in zip(node.inputs, node.outputs, strict=False):
                    self._alike(program, (number, atom), (number, value))
            elif node.rule is not None:
                self._by_rule(node, number)
            for region in regions(node):
                self._region(program, number, region)

    def _by_rule(self, node: Node, number: int) -> None:
        assert node.rule is not None
        seen: dict[str, Place] = {}
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

    def _region(self, program: Program, number: int, region: Region) -> None:
        body, inner = region.body, next(self._numbers)
        for i, (atom, value) in enumerate(zip(region.inputs, body.inputs, strict=True)):
            by = int(i >= region.sliced)
            self._alike(body, (inner, value), (number, atom), by)
        for j, (outside, atom) in enumerate(
            zip(region.outputs, body.outputs, strict=True)
        ):
            if outside is not None:
                by = int(j >= region.stacked)
                self._alike(body, (inner, atom), (number, outside), by)
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
    """

    of: int = 0
    same: int = 0
    written: int = 0

    def __or__(self, other: "Update") -> "Update":
        return Update(
            self.of | other.of, self.same | other.same, self.written | other.written
        )


NOTHING = Update()


def updates(program: Program) -> list[Update]:
    """What each output of a program updates; bit `i` stands for argument `i`.

    What a backward pass makes is a gradient, also where it adds a penalty's `2 w`.
    """
    given = [Update(1 << i, 1 << i) for i in range(len(program.inputs))]
    return _updates(program, given)


def _updates(program: Program, given: Sequence[Update]) -> list[Update]:
    known = dict(zip(program.inputs, given, strict=True))

    def read(atom: Atom | None) -> Update:
        return known.get(atom, NOTHING) if isinstance(atom, int) else NOTHING

    for node in program.nodes:
        ins = [read(atom) for atom in node.inputs]
        if not any(update.of for update in ins) or BACKWARD in node.derivatives:
            continue
        if node.bodies:
            results = _through_bodies(node, known)
        elif node.kind in ("barrier", "constrain") or _is_over_devices(node):
            results = [*ins[: len(node.outputs)]]
        else:
            results = [_through_op(node, ins, j) for j in range(len(node.outputs))]
        known.update(zip(node.outputs, results, strict=True))
    return [read(atom) for atom in program.outputs]


def _through_bodies(node: Node, known: dict[Any, Update]) -> list[Update]:
    results = [NOTHING] * len(node.outputs)
    for region in regions(node):
        if not any(value is not None for value in region.outputs):
            continue
        ins = [
            known.get(a, NOTHING) if isinstance(a, int) else NOTHING
            for a in region.inputs
        ]
        while True:
            outs = _updates(region.body, ins)
            joined = list(ins)
            for j, i in region.loops:
                joined[i] = joined[i] | outs[j]
            if joined == ins:
                break
            ins = joined
        results = [a | b for a, b in zip(results, outs, strict=True)]
    return results


def _through_op(node: Node, ins: Sequence[Update], result: int) -> Update:
    """What a result of an operation updates: the operands whose dimensions are, one by
    one, its own."""
    name, rule = node.eqn.primitive.name, node.rule
    made: Any = node.eqn.outvars[result].aval
    if rule is None or jnp.issubdtype(getattr(made, "dtype", bool), jnp.bool_):
        return NOTHING
    if rule.shifts or (rule.whole and name not in _WRITES):  # elements change places
        return NOTHING
    moves = name in _MOVES
    found = NOTHING
    for i, update in enumerate(ins):
        if rule.operands[i] != rule.results[result] or name in _WRITES and i:
            continue
        same = update.same if moves else 0
        written = update.written & same
        if name in _WRITES:
            written = same
        found |= Update(update.of, same, written)
    return found


def _is_over_devices(node: Node) -> bool:
    return node.rule is None and node.eqn.primitive.name in _OVER_DEVICES
