"""How loops are sharded: what they carry is a fixpoint, what they scan is sliced.

In: a scan or a while loop, at its site. Out: a `Decision` that holds the plans of its
bodies.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from shardfn._core.limits import JOINED_BYTES
from shardfn._core.plan import BodyPlan
from shardfn._core.program import Program
from shardfn._core.regions import span
from shardfn._core.resharding import can_split
from shardfn._core.sharding import (
    Axes,
    Sharding,
    Split,
    Unreduced,
    flat,
    of_dim,
    on_axis,
)
from shardfn._core.sizes import nbytes
from shardfn._propagation.batch_scans import RowLoop, row_loop
from shardfn._propagation.decision import Decision
from shardfn._propagation.flow_site import FlowSite, Solved
from shardfn._propagation.loop_carries import Carries
from shardfn._propagation.preferences import Preferences, union
from shardfn._propagation.stationary import gathers_stack


def scan(site: FlowSite) -> Decision:
    (body,), (region,) = site.node.bodies, site.node.regions
    states = [site.entering(i) for i in range(len(site.states))]
    loop = row_loop(site.node, site.operand_avals, states, site.axes)
    if loop is not None:
        return _over_rows(site, loop)
    consts = span(states, region.constants)
    xs = [_scanned(site, i) for i in region.slices]
    inner_xs = [_shift(s, -1) for s in xs]
    preferences = [
        _of_slices(w, site.result_avals[j], site.axes) if j in region.stacks else w
        for j, w in enumerate(site.preferences)
    ]
    every = frozenset(range(len(site.axes.names)))
    stacks_may_stay = span(site.may_stay_unreduced, region.stacks)

    def solve(carry: Sequence[Sharding], pin: bool) -> Solved:
        fixed = list(carry) if pin else [None] * len(carry)
        carried = [union(w, c) for w, c in zip(preferences, carry, strict=False)]
        return site.solve(
            body,
            (*consts, *carry, *inner_xs),
            (*fixed, *[None] * len(stacks_may_stay)),
            (*carried, *span(preferences, region.stacks)),
            (*(every for _ in carry), *stacks_may_stay),
            site.shared_in(0),
        )

    carry = _carries(
        site, body, region.carries, lambda c: solve(c, False).plan, preferences
    )
    solved = solve(carry, True)
    ys = span(solved.plan.output_shardings, region.stacks)
    out = (*carry, *(_shift(y, 1) for y in ys))
    back = tuple(
        _shift_preferences(w, 1) if i in region.slices else w
        for i, w in enumerate(solved.preferences)
    )
    return Decision((*consts, *carry, *xs), out, out, (), (solved.plan,), back)


def _over_rows(site: FlowSite, loop: RowLoop) -> Decision:
    """A scan over local rows: inside, a row is whole on its device."""
    (body,) = site.node.bodies
    whole = site.axes.replicated
    solved = site.solve(
        body,
        (whole,) * len(body.inputs),
        (whole,) * len(body.outputs),
        (site.no_preferences,) * len(body.outputs),
        (frozenset(),) * len(body.outputs),
        site.shared_in(0),
    )
    preferences = tuple(
        tuple(frozenset(() if isinstance(s, Unreduced) else (s,)) for s in operand)
        for operand in loop.operands
    )
    operands, results = loop.operands, loop.results
    return Decision(operands, results, results, (), (solved.plan,), preferences)


def _scanned(site: FlowSite, i: int) -> Sharding:
    """Sharding of a scanned operand: each iteration needs a slice of dimension
    0."""
    state, shape = site.entering(i), site.operand_avals[i].shape
    if gathers_stack(state, site.states, site.operand_avals[i]):
        return site.axes.replicated
    for axis, split in enumerate(state):
        if not isinstance(split, Split) or split.dim not in (0, flat(0)):
            continue
        state = on_axis(state, axis, None)
        other = _within_slices(split, shape, state, axis, site.axes)
        if other is not None:
            state = on_axis(state, axis, other)
    return state


def _within_slices(
    split: Split,
    shape: Sequence[int],
    state: Sharding,
    axis: int,
    axes: Axes,
    may_pad: bool = False,
) -> Split | None:
    """A split of another dimension than the first, over which a loop goes: of one that
    the devices divide, or else, if it may be, one that is padded."""
    padded = None
    for dim in range(1, len(shape)):
        other = replace(of_dim(split, dim), moved=not split.stored)
        if can_split(shape, state, axis, other, axes):
            if shape[dim] % axes.sizes[axis] == 0:
                return other
            padded = padded or other
    return padded if may_pad else None


def while_loop(site: FlowSite) -> Decision:
    test, body = site.node.bodies
    tested, looped = site.node.regions
    tests = [site.entering(i) for i in span(tested.operands, tested.constants)]
    consts = [site.entering(i) for i in span(looped.operands, looped.constants)]

    def solve(carry: Sequence[Sharding], pin: bool) -> Solved:
        fixed = carry if pin else [None] * len(carry)
        return site.solve(
            body,
            (*consts, *carry),
            tuple(fixed),
            tuple(union(w, c) for w, c in zip(site.preferences, carry, strict=True)),
            (frozenset(),) * len(carry),
            site.shared_in(1),
        )

    carry = _carries(
        site,
        body,
        span(looped.operands, looped.carries),
        lambda c: solve(c, False).plan,
        site.preferences,
        may_sum=False,
    )
    solved = solve(carry, True)
    solved_test = site.solve(
        test,
        (*tests, *carry),
        (site.axes.replicated,),
        [site.no_preferences],
        (frozenset(),),
        site.shared_in(0),
    )
    preferences = (
        *span(solved_test.preferences, tested.constants),
        *solved.preferences,
    )
    plans = (solved_test.plan, solved.plan)
    operands = (*tests, *consts, *carry)
    return Decision(operands, carry, carry, (), plans, preferences)


def _carries(
    site: FlowSite,
    body: Program,
    positions: Sequence[int],
    solve: Callable[[Sequence[Sharding]], BodyPlan],
    preferences: Sequence[Preferences],
    may_sum: bool = True,
) -> tuple[Sharding, ...]:
    """Shardings of the operands at `positions`, which the loop carries."""
    carries = Carries(
        body=body,
        solve=solve,
        avals=[site.operand_avals[i] for i in positions],
        preferences=preferences[: len(positions)],
        axes=site.axes,
        control=site.control,
    )
    initial = [_whole_rows(site, i) for i in positions]
    found = carries.shardings(initial, may_sum)
    site.notes += carries.notes
    return found


def _whole_rows(site: FlowSite, i: int) -> Sharding:
    """Operand `i` as the loop first carries it: small rows whole, where sums behind
    stationary leaves are."""
    state, aval = site.entering(i), site.operand_avals[i]
    small = site.whole and nbytes(aval) <= JOINED_BYTES
    rows = all(s is None or (isinstance(s, Split) and not s.stored) for s in state)
    return site.axes.replicated if small and rows else state


def _shift(state: Sharding, by: int) -> Sharding:
    """Sharding of a slice of (`by=-1`), or of a stack of (`by=1`), such values."""
    return tuple(_shifted(s, by) if isinstance(s, Split) else s for s in state)


def _shifted(split: Split, by: int) -> Split:
    return of_dim(split, split.dim + (by if split.dim >= 0 else -by))


def _of_slices(preferences: Preferences, aval: Any, axes: Axes) -> Preferences:
    """What is preferred of slices of a stack: of one that is to be split along the
    slices themselves, another dimension, from which it is exchanged."""
    found = list(_shift_preferences(preferences, -1))
    for axis, opinions in enumerate(preferences):
        splits = [split for split in opinions if split is not None]
        if len(splits) != 1 or splits[0].dim not in (0, flat(0)):
            continue
        (split,) = splits
        large = nbytes(aval) > JOINED_BYTES * aval.shape[0]
        other = _within_slices(
            *(split, aval.shape, axes.replicated, axis, axes),
            may_pad=split.stored and large,
        )
        if other is not None:
            found[axis] = frozenset({_shifted(other, -1)})
    return tuple(found)


def _shift_preferences(preferences: Preferences, by: int) -> Preferences:
    return tuple(
        frozenset(
            None if s is None else _shifted(s, by)
            for s in opinions
            if s is None or by > 0 or s.dim not in (0, flat(0))
        )
        for opinions in preferences
    )
