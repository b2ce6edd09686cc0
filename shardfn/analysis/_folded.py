"""All-reduces that a compiler folds: of one value, over one mesh axis and then another.

In: lines of a plan. Out: what one all-reduce over the devices of several would be.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from shardfn._core.moves import AllReduce
from shardfn.analysis._line_check import FOLDED
from shardfn.analysis._needs import Need, Partition


@dataclass(frozen=True, slots=True)
class Fold:
    """Lines that may be one all-reduce.

    Attributes:
      members: the lines.
      need: that all-reduce, as a line.
    """

    members: tuple[Need, ...]
    need: Need

    def count(self) -> None:
        """Reads off its lines how often it may still be found."""
        self.need.runs = min(member.runs for member in self.members)

    def credit(self) -> None:
        """Gives its lines what was found for it: bytes to the first, runs to all."""
        for found in self.need.found:
            for at, member in enumerate(self.members):
                member.found.append(replace(found, elements=0) if at else found)
                member.status.add(FOLDED)
                member.runs -= found.times
        self.need.found.clear()


def folds_of(needs: Sequence[Need]) -> list[Fold]:
    """What may be found for lines that reduce one value over several axes, those of
    most lines first."""
    chains: dict[object, list[Need]] = {}
    for need in needs:
        line = need.line
        if line.op == AllReduce.op and line.value and need.runs:
            kind = line.value, line.body, line.elements, line.dtype, line.reduces
            chains.setdefault(kind, []).append(need)
    runs = [
        chain[start:stop]
        for chain in chains.values()
        for start, stop in itertools.combinations(range(len(chain) + 1), 2)
        if stop - start > 1
    ]
    folds = [fold for run in runs if (fold := _fold(run))]
    return sorted(folds, key=lambda fold: -len(fold.members))


def _fold(members: Sequence[Need]) -> Fold | None:
    """None if they do not reduce over different axes."""
    over = {_united(each) for each in itertools.product(*(m.over for m in members))}
    sizes = {len(group) for partition in over for group in partition}
    count = 1
    for member in members:
        count *= member.devices
    if sizes != {count}:
        return None
    line = replace(members[0].line, devices=count)
    return Fold(tuple(members), Need(line, count, 0, frozenset(over)))


def _united(partitions: Iterable[Partition]) -> Partition:
    """Which devices are connected by several partitions taken together."""
    groups: list[frozenset[int]] = []
    for group in itertools.chain(*partitions):
        met = [g for g in groups if g & group]
        groups = [g for g in groups if not g & group]
        groups.append(group.union(*met))
    return frozenset(groups)
