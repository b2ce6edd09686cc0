"""Which nodes of a program are to be visited, one after another, after a change.

In: a program. Out: who makes and who reads each value; and an `Agenda`, which gives
each node once, in the program's order or against it, while others are added. So a
round of propagation costs what it changes, however long the program is.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardfn._core.program import Program


@dataclass(frozen=True, slots=True)
class Uses:
    """Who makes and who reads the values of one program.

    Attributes:
      makers: the node that makes each value; arguments have none.
      readers: the nodes that read each value, and as which operand, the last first.
    """

    makers: Mapping[int, int]
    readers: Mapping[int, Sequence[tuple[int, int]]]

    @classmethod
    def of(cls, program: Program) -> "Uses":
        nodes = [*enumerate(program.nodes)]
        readers: dict[int, list[tuple[int, int]]] = {}
        for index, node in reversed(nodes):
            for i, atom in enumerate(node.inputs):
                if isinstance(atom, int):
                    readers.setdefault(atom, []).append((index, i))
        return cls({v: index for index, node in nodes for v in node.outputs}, readers)


class Agenda:
    """Nodes to visit, each once: in order, or the last first."""

    def __init__(self, nodes: Iterable[int], last_first: bool = False) -> None:
        self.sign = -1 if last_first else 1
        self.seen = set(nodes)
        self.heap = sorted(self.sign * node for node in self.seen)

    def add(self, node: int) -> None:
        """One more node, which is to be visited after the one that is visited now."""
        if node not in self.seen:
            self.seen.add(node)
            heapq.heappush(self.heap, self.sign * node)

    def __iter__(self) -> Iterator[int]:
        while self.heap:
            yield self.sign * heapq.heappop(self.heap)
