"""Which values loops add up in place of the terms of their sums.

In: a body, what is the same each time that it runs, and terms that are added up over
its runs. Out: for each sum the values to add up in place of its terms, and the
operations that make the sum of their sums.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from shardfn._core.program import Program
from shardfn._trace.linear_terms import (
    Terms,
    TermSource,
    are_like,
    is_constant,
    linear_sources,
)


def sources_of(
    body: Program, same: Set[int], sums: Sequence[Terms]
) -> list[TermSource | None]:
    """The value to add up for each sum.

    It is the furthest back of those that are like the sum, if terms are multiplied with
    an array on the way; or one that is added up for another sum anyway. Terms may be
    made of several, of which others than one are added up for other sums.

    Args:
      body: the program that makes the terms.
      same: values that are the same each time that it runs.
      sums: what is added up.

    Returns:
      For each sum its source; None if there is none.
    """
    fixed = same | {node.outputs[0] for node in body.nodes if is_constant(node)}
    ways = [
        [s for s in linear_sources(body, fixed, terms) if len(s.values) == 1]
        for terms in sums
    ]
    own = [
        _furthest(s for s in sources if are_like(body, s.values, terms.aval))
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
    carried = {k: value for value, k in carriers.items()}
    choice = _together(_of_several(_Choice(body, fixed, sums, tuple(chosen), carried)))
    return [source and choice.with_carriers(source, k) for k, source in choice.each]


@dataclass(frozen=True, slots=True)
class _Choice:
    """Sources of sums.

    Attributes:
      body: the program that makes the terms.
      fixed: values that are the same each time that it runs.
      sums: what is added up.
      sources: the source of each sum; None if there is none.
      carried: the value that is added up for a sum, of those that have one.
    """

    body: Program
    fixed: Set[int]
    sums: Sequence[Terms]
    sources: tuple[TermSource | None, ...]
    carried: Mapping[int, int]

    @property
    def each(self) -> Iterable[tuple[int, TermSource | None]]:
        return enumerate(self.sources)

    def is_free(self, at: int) -> bool:
        """Whether terms of a sum are added up as they are, for that sum alone."""
        source, value = self.sources[at], self.carried.get(at)
        others = (s for k, s in self.each if s is not None and k != at)
        return (source is None or not source.nodes) and not any(
            value in other.values for other in others
        )

    def with_carriers(self, source: TermSource, at: int) -> TermSource:
        """A source of a sum that says for which sum each of its values is added up."""
        carriers = {value: k for k, value in self.carried.items()}
        return replace(
            source, carriers=tuple(carriers.get(v, at) for v in source.values)
        )

    def furthest(self, at: int) -> tuple[TermSource | None, Set[int]]:
        """The furthest source of a sum of which all values but one are added up for
        others; and that one, which is like the sum, if it needs one."""
        others = {value for k, value in self.carried.items() if k != at}
        terms, found = self.sums[at], list[tuple[TermSource, Set[int]]]()
        for source in linear_sources(self.body, self.fixed, terms, others):
            own = {*source.values} - others
            if len(own) <= 1 and are_like(self.body, own, terms.aval):
                found.append((source, own))
        return found[-1] if found else (None, set())

    def having(self, at: int, source: TermSource, own: Set[int]) -> "_Choice":
        """The choice with this source of a sum."""
        sources = (*self.sources[:at], source, *self.sources[at + 1 :])
        carried = {k: value for k, value in self.carried.items() if k != at}
        carried.update((at, value) for value in own)
        return replace(self, sources=sources, carried=carried)

    def moved(self, at: int) -> "_Choice":
        """The choice in which a sum has a source further back, and those that read what
        was added up for it do without; the same one if that cannot be."""
        now, before = self.sources[at], self.carried.get(at)
        source, own = self.furthest(at)
        if source is None or (now and len(source.nodes) <= len(now.nodes)):
            return self
        choice = self.having(at, source, own)
        for k, other in self.each:
            if k != at and other and before in other.values:
                without, needed = choice.furthest(k)
                mine = {value for j, value in self.carried.items() if j == k}
                if without is None or not needed <= mine:
                    return self
                choice = choice.having(k, without, needed)
        return choice


def _of_several(choice: _Choice) -> _Choice:
    """The choice with sources that are further back, of several values."""
    for _ in choice.sums:
        before = choice
        for k in range(len(choice.sums)):
            choice = choice.moved(k)
        if choice is before:
            break
    return choice


def _together(choice: _Choice) -> _Choice:
    """The choice in which sums that are made of the same values share them, each adding
    up one, where they are no more than these sums."""
    left = {k: terms for k, terms in enumerate(choice.sums) if choice.is_free(k)}
    others = {value for k, value in choice.carried.items() if k not in left}
    found: dict[int, TermSource] = {}
    for k, terms in left.items():
        for source in linear_sources(choice.body, choice.fixed, terms, others):
            if source.nodes:
                found[k] = source  # the furthest one is the last
    while found:
        group = _group(found, others)
        sources = {k: found.pop(k) for k in group}
        values = dict.fromkeys(v for s in sources.values() for v in s.values)
        carried = _shared_out(choice, group, [v for v in values if v not in others])
        if carried is not None:
            for k, source in sources.items():
                own = {carried[k]} if k in carried else set[int]()
                choice = choice.having(k, source, own)
    return choice


def _group(sources: Mapping[int, TermSource], others: Set[int]) -> list[int]:
    """Sums that are made of the same values as the first of them, or of the same as
    these, and so on."""
    group, values = list[int](), set[int]()
    for _ in sources:
        for k, source in sources.items():
            own = {*source.values} - others
            if k not in group and (not group or own & values):
                group.append(k)
                values |= own
    return group


def _shared_out(
    choice: _Choice, group: Sequence[int], values: Sequence[int]
) -> dict[int, int] | None:
    """For each of some sums one of the values, or none, which it is like; None if
    values are left over."""
    carried: dict[int, int] = {}
    for value in values:
        for k in group:
            like = are_like(choice.body, [value], choice.sums[k].aval)
            if k not in carried and like:
                carried[k] = value
                break
        else:
            return None
    return carried


def _carriers(own: Sequence[TermSource | None], sums: Iterable[int]) -> dict[int, int]:
    """For which of some sums each of their sources is added up: one that it is the only
    term of, if there is one."""
    found: dict[int, int] = {}
    for needs_it in (False, True):
        for k in sums:
            source = own[k]
            if source is not None and bool(source.nodes) is needs_it:
                found.setdefault(source.values[0], k)
    return found


def _carried(
    sources: Sequence[TermSource], carriers: Mapping[int, int], own: TermSource | None
) -> list[TermSource]:
    """The sources of a sum that are added up for some sum, or its own one."""
    return [s for s in sources if s.values[0] in carriers or s is own]


def _furthest(sources: Iterable[TermSource]) -> TermSource | None:
    return max(sources, key=lambda s: len(s.nodes), default=None)
