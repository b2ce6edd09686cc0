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
from shardfn._core.line_names import line_names
from shardfn._core.moves import AllGather
from shardfn._core.sharding import Axes
from shardfn.analysis._concatenated import match_concatenated
from shardfn.analysis._folded import folds_of
from shardfn.analysis._hlo import HloCollective, read_collectives
from shardfn.analysis._line_check import (
    ALL_REDUCED,
    FAITHFUL,
    FOLDED,
    HOISTED,
    INVARIANT,
    MERGED,
    MISSING,
    NARROWED,
    ONCE,
    PRESENT,
    PROMOTED,
    REWRITTEN,
    SHARED,
    TILED,
    UNDECIDED,
    UNROLLED,
    WIDENED,
    LineCheck,
)
from shardfn.analysis._needs import (
    Need,
    Supply,
    elements_of,
    is_between,
    is_op,
    need_of,
    scales_of,
    status_of,
    sums_whole,
)
from shardfn.analysis._tiled import match_tiled
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
    lines = [need_of(c, axes) for c in collectives]
    scales = {
        i: need_of(scales_of(c), axes) for i, c in enumerate(collectives) if c.scales
    }
    needs = [*_repeats_last(lines), *scales.values()]
    found = read_collectives(hlo_text)
    automatic = tuple(c for c in found if _is_automatic(c, axes))
    supplies = [
        Supply(c, line_names(c.op_name), c.times)
        for c in found
        if not _is_automatic(c, axes)
    ]
    _match(needs, supplies, _is_same, named=True)
    _match(needs, supplies, _is_like, named=True)
    folds = folds_of(needs)
    for fold in folds:
        fold.count()
        _match([fold.need], supplies, _is_same, named=False)
        fold.credit()
    _match(needs, supplies, _is_same, named=False)
    match_concatenated(needs, folds, supplies)
    _match(needs, supplies, _is_like, named=False)
    match_tiled(needs, supplies, platform)
    _match(needs, supplies, _is_any, named=True)
    checks = tuple(
        _check(need, scales.get(i), needs, platform) for i, need in enumerate(lines)
    )
    extra = (replace(s.collective, times=s.runs) for s in supplies if s.runs)
    return Verification(checks, tuple(extra), automatic, platform)


def _repeats_last(needs: Sequence[Need]) -> list[Need]:
    """Lines, those last of which an earlier one computes the same: they are what is
    not found where a compiler merges both and leaves no names."""
    seen: dict[object, list[Need]] = {}
    repeats: set[int] = set()
    for need in needs:
        others = seen.setdefault(need.line.alike, [])
        if any(_computes_same(need, other) for other in others):
            repeats.add(id(need))
        others.append(need)
    return sorted(needs, key=lambda need: id(need) in repeats)


def _check(
    need: Need, scales: Need | None, needs: Sequence[Need], platform: str
) -> LineCheck:
    """What there is for a line and its scales; of these only if the line itself is as
    planned."""
    status, found = _status(need, needs, platform), tuple(need.found)
    if scales is None:
        return LineCheck(need.line, status, found)
    if status in FAITHFUL:
        of_scales = _status(scales, needs, platform)
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
        if not supply.runs:
            continue
        keys = sorted(supply.names) if named else supply.keys
        able = [need for key in keys for need in by.get(key, ())]
        # Those of which nothing is found yet come first: a compiler may join several.
        for need in sorted(able, key=lambda n: n.is_uncounted and bool(n.found)):
            more = need.runs or (named and need.is_uncounted)
            if supply.runs and more and test(need, supply.collective):
                _credit(need, supply, status_of(need, supply.collective))


def _credit(need: Need, supply: Supply, status: str) -> None:
    """Counts runs of `supply` for `need`; all it needs if their number is unknown, and
    all that there are if it is unknown how many it needs."""
    exact = supply.collective.exact
    runs = min(need.runs, supply.runs) if exact else need.runs
    if exact and need.is_uncounted:
        runs = supply.runs
    need.found.append(replace(supply.collective, times=runs))
    need.status.add(status)
    need.runs = max(need.runs - runs, 0)
    supply.runs = supply.runs - runs if exact else 0


def _is_same(need: Need, found: HloCollective) -> bool:
    return _is_like(need, found) and status_of(need, found) == PRESENT


def _is_like(need: Need, found: HloCollective) -> bool:
    """The same collective, or an all-reduce in its place, of as many elements."""
    if need.line.elements != elements_of(need, found) or not is_between(need, found):
        return False
    return is_op(need, found) or sums_whole(found)


def _is_any(need: Need, found: HloCollective) -> bool:
    return True


def _status(need: Need, needs: Iterable[Need], platform: str) -> str:
    if not need.runs:
        return _worst(need, platform)
    if UNDECIDED in need.status:
        return UNDECIDED
    twins = [other for other in needs if _is_twin(need, other)]
    lives_on = need.line.op == AllGather.op and not compat.hoists_gathers(platform)
    if need.left_loops and not lives_on:
        return _worst(need, platform, INVARIANT)
    if _is_in_rounds(need, twins):
        return _worst(need, platform, UNROLLED)
    if need.left_loops:
        return HOISTED
    whole = [other for other in twins if not other.runs or other.left_loops]
    if compat.merges_gathers(platform) and twins:
        found = [c.times for each in (need, *twins) for c in each.found]
        outside = not need.line.hoisted.isdisjoint(found)  # or several lines have some
        enough = outside or sum(found) >= need.line.each
        return SHARED if enough else MISSING
    if any(_is_apart(need, other) for other in whole):
        return ONCE
    if any(_computes_same(need, other) and not other.runs for other in needs):
        return ONCE
    if whole and need.line.hoisted and compat.hoists_gathers(platform):
        return SHARED
    return MERGED if whole else MISSING


def _is_in_rounds(need: Need, twins: Sequence[Need]) -> bool:
    """Whether a line, together with those that gather the same leaf, was found once for
    all iterations that are written out beside each other."""
    each = (need, *twins)
    fewest = sum(min(n.line.unrolled, default=n.line.each) for n in each)
    found = sum(found.times for n in each for found in n.found)
    return bool(need.line.unrolled) and found >= fewest


def _worst(need: Need, platform: str, well: str = PRESENT) -> str:
    """The worst of what was found for a line, `well` if all is as it should be."""
    worst = (REWRITTEN, ALL_REDUCED, WIDENED, NARROWED, FOLDED, TILED)
    status = next((s for s in worst if s in need.status), well)
    dtypes = {found.dtype for found in need.found}
    promoted = compat.promoted_dtype(platform, need.line.dtype)
    return PROMOTED if status == WIDENED and dtypes == {promoted} else status


def _is_twin(need: Need, other: Need) -> bool:
    """Whether `other` gathers the same leaf as `need`, or moves the same value in the
    same way."""
    a, b = need.line, other.line
    sizes = (a.op, a.axis, a.dtype, a.elements) == (b.op, b.axis, b.dtype, b.elements)
    if other is need or not sizes:
        return False
    if a.op == AllGather.op:
        return a.path == b.path if a.path else a.value == b.value
    moves = [[why.move for why in line.why] for line in (a, b)]
    return a.value == b.value and moves[0] == moves[1] and len(moves[0]) == 1


def _computes_same(need: Need, other: Need) -> bool:
    """Whether two lines of one pass move in the same way what the step itself computes
    twice: a compiler for one device merges that, too. Gathers of leaves are kept apart
    for memory, so they are not meant."""
    a, b = need.line, other.line
    may_merge = a.alike and (a.reduces or not a.path)
    if not may_merge or a.alike != b.alike or a.value == b.value:
        return False
    at = [(x.phase, x.gradient, x.op, x.axis, x.dtype, x.elements) for x in (a, b)]
    moves = [[why.move for why in line.why] for line in (a, b)]
    return at[0] == at[1] and moves[0] == moves[1] and len(moves[0]) == 1


def _is_apart(need: Need, other: Need) -> bool:
    """Whether two lines are of bodies that run side by side in one pass: nothing lives
    longer if a compiler finds that they compute the same."""
    a, b = need.line, other.line
    in_both = bool(a.body) and bool(b.body)
    return in_both and a.body != b.body and a.phase == b.phase
