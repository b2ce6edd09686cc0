"""Where a body of a plan is, and how far out of it its values could be made.

In: a program, the bodies of its nodes. Out: of every value which one of the programs
around it it is, and out of how many bodies it could be made. What depends on nothing
that changes from iteration to iteration is the same in each: a compiler may move it,
and what moves it, in front of the loop.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shardfn._core.plan import Place
from shardfn._core.program import Node, Program


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What is around a program that is the body of a node.

    Attributes:
      place: which body it is.
      around: how often the bodies around it run per step, the nearest first; None if
        that cannot be known.
      rounds: how often each of them begins a round of the loop that the body next to it
        is of: fewer than it has iterations where the loop is written out in part.
      same: of its arguments, which values of programs around it they are.
      alike: of its arguments, the first one that is computed as it is.
      outside: of its values, out of how many bodies they could be made; 0 if missing.
    """

    place: Place = ()
    around: tuple[int | None, ...] = ()
    rounds: tuple[int | None, ...] = ()
    same: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    alike: Mapping[int, int] = field(default_factory=dict)
    outside: Mapping[int, int] = field(default_factory=dict)

    def identity(self, value: int) -> tuple[int, ...]:
        """Which value it is, the same in every body that reads it."""
        return self.same.get(value, (*self.place, value))

    def runs_outside(self, value: int) -> frozenset[int]:
        """How often a step would make a value, made further out."""
        runs = self.around[: self.outside.get(value, 0)]
        return frozenset(times for times in runs if times is not None)

    def runs_of_rounds(self, value: int) -> frozenset[int]:
        """How often it would, made once for the iterations of a round."""
        runs = self.rounds[: self.outside.get(value, 0)]
        return frozenset(times for times in runs if times is not None)

    def within(
        self, node: Node, i: int, at: int, times: int | None, first: Mapping[int, int]
    ) -> "Surroundings":
        """What is around body `i` of node `at`; its program runs `times` times, and
        `first` numbers its values (see `_computed_alike`)."""
        program, region = node.bodies[i], node.regions[i]
        given = [
            (program.inputs[a], node.inputs[region.operands[a]])
            for a in region.constants
        ]
        most = len(self.around)
        depths = {
            v: 1 + (self.outside.get(atom, 0) if isinstance(atom, int) else most)
            for v, atom in given
        }
        return Surroundings(
            place=(*self.place, at, i),
            around=(times, *self.around),
            rounds=(_product(times, _rounds(node)), *self.rounds),
            same={v: self.identity(a) for v, a in given if isinstance(a, int)},
            alike=_firsts((v, first[a]) for v, a in given if isinstance(a, int)),
            outside=_made_outside(program, depths, most + 1),
        )


ALONE = Surroundings()
"""A whole step."""


def _firsts(numbered: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Of each value, the first one of its number."""
    values: dict[int, int] = {}
    return {value: values.setdefault(number, value) for value, number in numbered}


def _rounds(node: Node) -> int | None:
    """Rounds of a loop in which several iterations are written out beside each other,
    those behind the last counted as one; None if there are none."""
    unroll = node.eqn.params["unroll"] if node.kind == "scan" else 1
    length = node.times or 0
    if unroll == 1 or not length:
        return None
    unroll = unroll or length  # JAX's 0 is all
    return -(-length // unroll) if length >= 2 * unroll else 1


def _product(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a * b


def _made_outside(
    program: Program, arguments: Mapping[int, int], most: int
) -> Mapping[int, int]:
    """Out of how many of `most` bodies each value could be made, if its arguments
    could."""
    out = {v: arguments.get(v, 0) for v in program.inputs}
    out.update((v, most) for v, _ in program.constants)
    for node in program.nodes:
        known = (out[v] for v in node.inputs if isinstance(v, int))
        depth = 0 if node.eqn.effects else min(known, default=most)
        out.update((v, depth) for v in node.outputs)
    return out
