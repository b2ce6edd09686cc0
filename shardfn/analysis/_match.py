"""Which lines of a plan a compiled program has.

In: both. Out: for each line, the collectives that are it.

A collective belongs to the line whose name its metadata carries (see `line_name`), if
it moves what the line says. What is left over is matched by what it moves alone: a
compiler that combines collectives may keep one name, or none. Then come lines that the
program has in another form.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from shardfn._core import compat
from shardfn._core.limits import SUBSET_BITS
from shardfn._core.line_names import line_names
from shardfn._core.moves import AllGather, AllReduce
from shardfn._core.sharding import Axes
from shardfn.analysis._hlo import HloCollective, read_collectives
from shardfn.analysis._line_check import (
    ALL_REDUCED,
    FAITHFUL,
    MERGED,
    MISSING,
    NARROWED,
    ONCE,
    PRESENT,
    REWRITTEN,
    SHARED,
    UNDECIDED,
    WIDENED,
    LineCheck,
)
from shardfn.analysis._needs import (
    Need,
    Supply,
    is_op,
    need_of,
    scales_of,
    status_of,
    sums_whole,
)
from shardfn.analysis.collective import Collective
from shardfn.analysis.verification import Verification


def verify(
    collectives: Sequence[Collective],
    axes: Axes,
    hlo_text: str,
    platform: str = "",
) -> Verification:
    """Holds a compiled program against its plan.

    Args:
      collectives: the lines of the plan.
      axes: the mesh axes that it is planned over.
      hlo_text: the optimized program, as `jax.stages.Compiled.as_text()` prints it.
      platform: what it was compiled for, if known, such as "cpu".

    Returns:
      What the program has for every line, and what it has besides.
    """
    lines = [need_of(c) for c in collectives]
    scales = {i: need_of(scales_of(c)) for i, c in enumerate(collectives) if c.scales}
    needs = [*lines, *scales.values()]
    found = read_collectives(hlo_text)
    automatic = tuple(c for c in found if _is_automatic(c, axes))
    supplies = [
        Supply(c, line_names(c.op_name), c.times)
        for c in found
        if not _is_automatic(c, axes)
    ]
    _match(needs, supplies, _is_same, named=True)
    _match(needs, supplies, _is_same, named=False)
    _match(needs, supplies, _is_like, named=True)
    _match_concatenated(needs, supplies)
    _match(needs, supplies, _is_like, named=False)
    _match(needs, supplies, _is_any, named=True)
    merged = SHARED if compat.merges_gathers(platform) else MERGED
    checks = tuple(
        _check(need, scales.get(i), needs, merged) for i, need in enumerate(lines)
    )
    extra = (replace(s.collective, times=s.runs) for s in supplies if s.runs)
    return Verification(checks, tuple(extra), automatic)


def _check(
    need: Need, scales: Need | None, needs: Sequence[Need], merged: str
) -> LineCheck:
    """What there is for a line and its scales; of these only if the line itself is as
    planned."""
    status, found = _status(need, needs, merged), tuple(need.found)
    if scales is None:
        return LineCheck(need.line, status, found)
    if status in FAITHFUL:
        of_scales = _status(scales, needs, merged)
        status = status if of_scales in FAITHFUL else of_scales
    return LineCheck(need.line, status, found, tuple(scales.found))


def _is_automatic(collective: HloCollective, axes: Axes) -> bool:
    """Whether only devices talk to each other that our mesh axes do not tell apart."""
    sizes = [size for _, size in axes.mesh]
    if len(sizes) == len(axes.names) or collective.group_size == 1:
        return False
    own = [i for i, (name, _) in enumerate(axes.mesh) if name in axes.names]
    at = np.stack(np.unravel_index(np.arange(math.prod(sizes)), sizes))[own]
    return all(
        (at[:, list(group)].T == at[:, group[0]]).all() for group in collective.groups
    )


Test = Callable[[Need, HloCollective], bool]


def _match(
    needs: Iterable[Need], supplies: Iterable[Supply], test: Test, *, named: bool
) -> None:
    """Gives lines the compiled collectives that pass `test`, in program order; only
    those that carry their name, or any of their size."""
    by: dict[object, list[Need]] = {}
    for need in needs:
        by.setdefault(need.line.name if named else need.key, []).append(need)
    for supply in supplies:
        keys = sorted(supply.names) if named else [supply.key]
        wanting = (n for key in keys if supply.runs for n in by.get(key, ()))
        for need in wanting:
            if supply.runs and need.runs and test(need, supply.collective):
                _credit(need, supply, status_of(need, supply.collective))


def _credit(need: Need, supply: Supply, status: str) -> None:
    """Counts runs of `supply` for `need`; all it needs if their number is unknown."""
    exact = supply.collective.exact
    runs = min(need.runs, supply.runs) if exact else need.runs
    need.found.append(replace(supply.collective, times=runs))
    need.status.add(status)
    need.runs -= runs
    supply.runs = supply.runs - runs if exact else 0


def _is_same(need: Need, found: HloCollective) -> bool:
    return _is_like(need, found) and status_of(need, found) == PRESENT


def _is_like(need: Need, found: HloCollective) -> bool:
    """The same collective, or an all-reduce in its place, of as many elements."""
    if need.key != (found.elements, found.group_size):
        return False
    return is_op(need, found) or sums_whole(found)


def _is_any(need: Need, found: HloCollective) -> bool:
    return True


def _match_concatenated(needs: Sequence[Need], supplies: Sequence[Supply]) -> None:
    """Explains sums of long arrays by lines whose sums they concatenate, also those of
    a loop that the compiler does once after it.

    Which line went where is not always known, and need not be: sums of one kind that
    hold as many elements as the lines that are left for them hold them all.
    """
    kinds: dict[tuple[object, ...], list[Supply]] = {}
    for supply in supplies:
        whole = supply.collective
        if whole.op == AllReduce.op and supply.runs and whole.elements:
            kind = whole.reduces, whole.group_size, whole.bytes / whole.elements
            kinds.setdefault(kind, []).append(supply)
    for alike in kinds.values():
        for supply in alike:
            whole = supply.collective
            parts = _parts_of(whole, needs)
            for need in _summing_to(supply, parts):
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
        and n.devices == whole.group_size
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


def _status(need: Need, needs: Iterable[Need], merged: str) -> str:
    if not need.runs:
        worst = (REWRITTEN, ALL_REDUCED, WIDENED, NARROWED)
        return next((s for s in worst if s in need.status), PRESENT)
    if UNDECIDED in need.status:
        return UNDECIDED
    twins = [other for other in needs if _is_twin(need, other)]
    whole = [other for other in twins if not other.runs]
    if merged == MERGED and any(_is_apart(need, other) for other in whole):
        return ONCE
    if merged == SHARED and twins:  # those of several lines, each with some of them
        found = sum(c.times for each in (need, *twins) for c in each.found)
        return SHARED if found >= (need.line.times or 1) else MISSING
    return merged if whole else MISSING


def _is_twin(need: Need, other: Need) -> bool:
    """Whether `other` gathers the same leaf as `need`, or the same value."""
    a, b = need.line, other.line
    alike = (a.axis, a.dtype, a.elements) == (b.axis, b.dtype, b.elements)
    same = a.path == b.path if a.path else a.value == b.value
    gathers = a.op == b.op == AllGather.op
    return other is not need and alike and same and gathers


def _is_apart(need: Need, other: Need) -> bool:
    """Whether two lines gather for bodies that run side by side in one pass: nothing
    lives longer if a compiler finds that they compute the same."""
    a, b = need.line, other.line
    in_both = bool(a.body) and bool(b.body)
    return in_both and a.body != b.body and a.phase == b.phase
