"""Sums that a compiler joins: it concatenates all-reduces of one kind.

In: lines of a plan and collectives of a compiled program that are left. Out: which
sums hold which lines.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from shardfn._core.moves import AllReduce
from shardfn._core.reading_limits import SUBSET_BITS
from shardfn.analysis._folded import Fold
from shardfn.analysis._hlo import HloCollective
from shardfn.analysis._line_check import PRESENT, UNDECIDED
from shardfn.analysis._needs import Need, Supply, status_of


def match_concatenated(
    needs: Sequence[Need], folds: Sequence[Fold], supplies: Sequence[Supply]
) -> None:
    """Explains sums of long arrays by lines whose sums they concatenate, also those of
    a loop that the compiler does once after it.

    Which line went where is not always known, and need not be: sums of one kind that
    hold as many elements as the lines that are left for them hold them all. Sums over
    more devices come first: a line that is folded into one is in no other.
    """
    kinds: dict[tuple[Any, ...], list[Supply]] = {}
    for supply in supplies:
        whole = supply.collective
        if whole.op == AllReduce.op and supply.runs and whole.elements:
            among = -whole.group_size, tuple(sorted(whole.groups))
            kind = *among, whole.reduces, whole.bytes / whole.elements
            kinds.setdefault(kind, []).append(supply)
    for _, alike in sorted(kinds.items(), key=lambda kind: kind[0]):
        for fold in folds:
            fold.count()
        _match_kind([*(f.need for f in folds), *needs], alike)
        for fold in folds:
            fold.credit()


def _match_kind(needs: Sequence[Need], alike: Sequence[Supply]) -> None:
    for supply in alike:
        whole = supply.collective
        for need in _summing_to(supply, _parts_of(whole, needs)):
            _credit_part(need, whole)
            supply.runs = 0
    left = [supply for supply in alike if supply.runs]
    parts = _parts_of(alike[0].collective, needs) if left else []
    total = sum(supply.collective.elements * supply.runs for supply in left)
    if total == sum(need.line.elements * need.runs for need in parts):
        for need in parts:
            _credit_part(need, left[0].collective)
        for supply in left:
            supply.runs = 0
    elif len(left) > 1 or len(parts) > 1:
        for need in parts:
            need.status.add(UNDECIDED)


def _parts_of(whole: HloCollective, needs: Iterable[Need]) -> list[Need]:
    """The lines that a sum may hold among others."""
    return [
        n
        for n in needs
        if n.runs
        and n.line.op == AllReduce.op
        and status_of(n, replace(whole, elements=n.line.elements)) == PRESENT
    ]


def _credit_part(need: Need, whole: HloCollective) -> None:
    part = replace(whole, elements=need.line.elements, times=need.runs)
    need.found.append(replace(part, combined=max(2, whole.combined)))
    need.status.add(PRESENT)
    need.runs = 0


def _summing_to(supply: Supply, parts: Sequence[Need]) -> list[Need]:
    """Lines whose elements, over all runs, sum to those of `supply`, those that it
    names among them; none if there are no such lines, or the table is too large."""
    named = [n for n in parts if n.line.name in supply.names]
    left = supply.collective.elements * supply.runs
    left -= sum(n.line.elements * n.runs for n in named)
    others = [
        n
        for n in parts
        if n.line.name not in supply.names and n.line.elements * n.runs <= left
    ]
    if left < 0 or left * len(others) > SUBSET_BITS:
        return []
    reached, steps = 1, []  # bit i: whether some of the lines so far sum to i
    for need in others:
        new = (reached << need.line.elements * need.runs) & ((2 << left) - 1) & ~reached
        steps.append(new)
        reached |= new
    if not reached >> left & 1:
        return []
    for need, new in zip(reversed(others), reversed(steps), strict=True):
        if new >> left & 1:
            named.append(need)
            left -= need.line.elements * need.runs
    return named
