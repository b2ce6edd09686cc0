"""Runs an op along another dimension than the batch's, where less of the batch moves.

In: an op that needs rows of the batch whole, or makes terms of a sum as large as they
are, and how it is decided so far. Out: the same decision, or one in which devices
exchange rows of the batch for parts of all rows in front of the op, and back behind it.
What is before and after that stays as it is.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from shardfn._core.limits import EXCHANGE_SHARE, LATENCY_BYTES
from shardfn._core.moves import moves_of
from shardfn._core.plan import Apply, BodyPlan
from shardfn._core.program import ZERO
from shardfn._core.reasons import Note
from shardfn._core.resharding import reshard_path
from shardfn._core.sharding import (
    Split,
    Unreduced,
    axes_of,
    without_origin,
)
from shardfn._core.sizes import itemsize
from shardfn._propagation.decision import Decision
from shardfn._propagation.op_strategy import OpSite
from shardfn._propagation.stationary import meets_stationary

EXCHANGED = Note(
    "propagate",
    f"this sends at least {EXCHANGE_SHARE:.0%} less than to gather rows of the batch, "
    "or to sum as large terms, or less is held at once (limits.EXCHANGE_SHARE, "
    "limits.LATENCY_BYTES, limits.LOOP_MOST)",
)


def exchange_rows(site: OpSite, decision: Decision, shared: Sequence[int]) -> Decision:
    """Decides one op again where less of the batch moves so.

    Args:
      site: the op, its operands, and what is preferred of its results.
      decision: how it runs, with the shardings in which its results are left.
      shared: in how many iterations of loops around it each operand is the same: it is
        exchanged once for all of them (see `_schedule.loop_invariants`). Whether to
        gather it once is better is for the whole plan to say, as all devices then hold
        all of it.

    Returns:
      The decision, or one that leaves its results alike.
    """
    forced: dict[int, str] = {}
    for group in _together(site):
        if not all(_moves_rows(site, decision, axis) for axis in group):
            continue
        now = _sent(site, decision, [1] * len(shared))
        for factor, other in _others(site, decision, forced, group) if now[1] else ():
            other = replace(other, results=decision.results)
            sent = _sent(site, other, shared)
            saves = _price(sent) <= (1 - EXCHANGE_SHARE) * _price(now)
            if saves and sent[0] <= now[0]:
                forced.update(dict.fromkeys(group, factor))
                now, decision = sent, other
    if forced:
        decision = replace(decision, notes=(*decision.notes, EXCHANGED))
    return decision


def has_exchanges(body: BodyPlan) -> bool:
    """Whether a plan has such an op."""
    return any(
        any(map(has_exchanges, step.bodies))
        if isinstance(step, Apply)
        else step.cause is not None and EXCHANGED in step.cause.notes
        for step in body.steps
    )


def _moves_rows(site: OpSite, decision: Decision, axis: int) -> bool:
    """Whether the op takes rows of the batch, and what it makes are none but rows: no
    gradient of a leaf, nor terms that are summed with others later."""
    splits = [state[axis] for state in site.states]
    if not any(isinstance(s, Split) and not s.stored for s in splits):
        return False
    if meets_stationary(axis, site.states, site.preferences):
        return False
    for made, result in zip(decision.made, decision.results, strict=True):
        left = result[axis]
        of_rows = isinstance(left, Split) and not left.stored
        if isinstance(made[axis], Unreduced) and not of_rows:
            return False
    return True


def _together(site: OpSite) -> list[tuple[int, ...]]:
    """The mesh axes of more than one device, those together that split rows of the
    batch together."""
    groups: list[tuple[int, ...]] = []
    for axis, count in enumerate(site.axes.sizes):
        if count == 1 or any(axis in group for group in groups):
            continue
        every = {axis}
        for state in site.states:
            split = state[axis]
            if isinstance(split, Split) and not split.stored:
                every.update(axes_of(state, split.dim))
        groups.append(tuple(a for a in sorted(every) if site.axes.sizes[a] > 1))
    return groups


def _others(
    site: OpSite, now: Decision, forced: Mapping[int, str], group: Sequence[int]
) -> Iterator[tuple[str, Decision]]:
    """Decisions in which these axes split another factor, one that stands in a
    result."""
    standing = (site.rule.major(d, i) for d in site.rule.results for i in range(len(d)))
    for factor in dict.fromkeys(standing):
        if factor is None or any((factor, axis) in now.parts for axis in group):
            continue
        other = replace(
            site,
            forced={**forced, **dict.fromkeys(group, factor)},
            operands=[],
            results=[],
            parts=[],
            notes=[],
        )
        decided = other.decide()
        if all((factor, axis) in decided.parts for axis in group):
            yield factor, decided


def _price(sent: tuple[float, float]) -> float:
    """Bytes, and those that could be sent while collectives begin."""
    return sent[0] + sent[1] * LATENCY_BYTES


def _sent(
    site: OpSite, decision: Decision, shared: Sequence[int]
) -> tuple[float, float]:
    """Bytes that a device sends of the batch, and in how many collectives, each time
    that the op runs."""
    moved = [
        (aval, state, needed, times)
        for aval, kind, state, needed, times in zip(
            site.operand_avals,
            site.kinds,
            site.states,
            decision.operands,
            shared,
            strict=True,
        )
        if kind != ZERO and not any(isinstance(s, Split) and s.stored for s in state)
    ]
    made = zip(site.result_avals, decision.made, decision.results, strict=True)
    moved += [(*each, 1) for each in made]
    sent = collectives = 0.0
    for aval, start, end, times in moved:
        ends = without_origin(start), without_origin(end)
        if ends[0] == ends[1]:
            continue
        for move in moves_of(reshard_path(*ends, aval.shape, site.axes)):
            if move.communicates:
                wire = move.wire_bytes(aval.shape, site.axes, itemsize(aval))
                sent += wire / times
                collectives += 1 / times
    return sent, collectives
