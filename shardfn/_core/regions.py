"""The one place that knows how the operands of control flow lie.

In: the counts in an equation's params. Out: a `Region` per body: which operand each of
its arguments is, which result of the node each of its results is, and what of both is
constant, carried or sliced.

    scan    constants | carries | slices          -> carries | stacks
    while   constants of the test | constants of the body | carries -> carries
    cond    index | operands                      -> results
    calls   operands                              -> results
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

EMPTY = range(0)


@dataclass(frozen=True, slots=True)
class Region:
    """How the arguments and results of a body lie among those of its node.

    Attributes:
      operands: per argument, the position of the operand that it is.
      results: per result, the position of the node's result that it is; None for one
        that stays inside, such as a loop's test.
      constants: the arguments that are the same each time that the body runs.
      carries: the arguments that each iteration hands on to the next.
      slices: the arguments that are, in each iteration, one slice of their operands
        along dimension 0.
      stacks: the results that are one slice of the node's results along dimension 0.
      loops: `(result, argument)` for all that the next iteration starts with.
    """

    operands: tuple[int, ...]
    results: tuple[int | None, ...]
    constants: range
    carries: range = EMPTY
    slices: range = EMPTY
    stacks: range = EMPTY
    loops: tuple[tuple[int, int], ...] = ()

    def entering(self, operands: Sequence[T]) -> list[T]:
        """What of the node's operands enters the body, in the order of its
        arguments."""
        return [operands[i] for i in self.operands]

    def leaving(self, results: Sequence[T], inside: T) -> list[T]:
        """What of the node's results leaves the body, in the order of its results;
        `inside` for those that do not."""
        return [inside if i is None else results[i] for i in self.results]

    def returned(self) -> Iterator[tuple[int, int]]:
        """`(result, result of the node)` for all that leave the body."""
        for j, result in enumerate(self.results):
            if result is not None:
                yield j, result


def span(each: Sequence[T], positions: range) -> Sequence[T]:
    """The arguments or results at `positions`, which lie side by side."""
    return each[positions.start : positions.stop]


def of_scan(
    constants: int, carries: int, operands: int, results: int
) -> tuple[Region, ...]:
    """The body of a scan."""
    start = constants + carries
    region = Region(
        operands=tuple(range(operands)),
        results=tuple(range(results)),
        constants=range(constants),
        carries=range(constants, start),
        slices=range(start, operands),
        stacks=range(carries, results),
        loops=tuple((j, constants + j) for j in range(carries)),
    )
    return (region,)


def of_while(test: int, body: int, operands: int) -> tuple[Region, ...]:
    """The test and the body of a while loop, of so many constants each."""
    start = test + body
    carried = range(start, operands)
    tested = Region(
        operands=(*range(test), *carried),
        results=(None,),
        constants=range(test),
        carries=range(test, test + len(carried)),
    )
    looped = Region(
        operands=tuple(range(test, operands)),
        results=tuple(range(len(carried))),
        constants=range(body),
        carries=range(body, body + len(carried)),
        loops=tuple((j, body + j) for j in range(len(carried))),
    )
    return tested, looped


def with_constants(
    kind: str, before: Sequence[Region], more: int, operands: int, results: int
) -> tuple[Region, ...]:
    """The regions of a loop or call that is given more constants, last of those that
    its body has.

    Args:
      kind: of the node: "scan", "while" or a call.
      before: its regions.
      more: how many constants it is given more.
      operands: how many operands it then has.
      results: how many results.

    Returns:
      The regions.
    """
    body = before[-1]
    constants = len(body.constants) + more
    if kind == "scan":
        return of_scan(constants, len(body.carries), operands, results)
    if kind == "while":
        return of_while(len(before[0].constants), constants, operands)
    return of_call(operands, results)


def of_cond(branches: int, operands: int, results: int) -> tuple[Region, ...]:
    """The branches of a conditional: all take every operand but the index."""
    branch = Region(
        operands=tuple(range(1, operands)),
        results=tuple(range(results)),
        constants=range(operands - 1),
    )
    return (branch,) * branches


def of_call(operands: int, results: int) -> tuple[Region, ...]:
    """The body of a call that runs once."""
    region = Region(
        operands=tuple(range(operands)),
        results=tuple(range(results)),
        constants=range(operands),
    )
    return (region,)
