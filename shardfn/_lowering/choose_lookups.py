"""Lookups in tables whose rows devices own: the rows are asked of their owners.

In: a program and its plan, and a function that plans. Out: the program in which devices
exchange requests and rows, in rounds, where otherwise every device would give its part
of all rows that are looked up, or the table would be gathered. What a round sends is
known; how many rounds a step needs depends on the data (`_trace.row_requests`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from shardfn._core.errors import listed, where
from shardfn._core.limits import (
    ASKED_ROUNDS,
    STATIONARY_BYTES,
    STATIONARY_LIVE,
    STATIONARY_SHARE,
)
from shardfn._core.plan import Apply, BodyPlan, Reshard
from shardfn._core.program import ZERO, Node, Program, number_of
from shardfn._core.sent_bytes import Made, Sent, sent
from shardfn._core.sharding import Axes, Sharding, Split, Unreduced
from shardfn._core.shown_limits import SHOWN_LEAVES
from shardfn._core.sizes import nbytes
from shardfn._lowering.constrained_values import BodyPath
from shardfn._lowering.exchanged_lookups import Lookup, lookup_of, with_requests
from shardfn._lowering.live_bytes import live_bytes
from shardfn.analysis._text import size_text


@dataclass(frozen=True, slots=True)
class LookupsChoice:
    """What was found of lookups in tables whose rows devices own.

    Attributes:
      program: the program in which rows are asked of their owners; None if none are.
      places: the user's lines.
      at_once: the least and the most rows that one device asks of one other in a round.
      before: what each device sends per step if they are not.
      after: what it sends if they are, in one round each.
    """

    program: Program | None = None
    places: tuple[str, ...] = ()
    at_once: tuple[int, int] = (0, 0)
    before: Sent = Sent()
    after: Sent = Sent()

    @property
    def notes(self) -> tuple[str, ...]:
        """The plan's line about them."""
        if self.program is None:
            return ()
        before, after = (size_text(x.bytes) for x in (self.before, self.after))
        most = " to ".join(map(str, dict.fromkeys(self.at_once)))
        return (
            f"rows are asked of the devices that own them, at most {most} of each at "
            "once (limits.ASKED_SPREAD), in rounds until all are served: "
            f"{listed(self.places, SHOWN_LEAVES)}: {after} sent per step if one round "
            f"serves all, instead of {before}, and less even in {ASKED_ROUNDS} rounds "
            "(limits.ASKED_ROUNDS)",
        )


def exchanged_lookups(program: Program, made: Made, axes: Axes) -> LookupsChoice:
    """The program with rows asked of their owners, where that may be worth it.

    Args:
      program: the program, before any pass of planning changes it.
      made: the program that its passes made of it, and its plan.
      axes: the mesh axes.

    Returns:
      The program, if it is worth to plan it, and what is sent now.
    """
    rows = [name for name in axes.batch if axes.size(name) > 1]
    if rows != [axes.names[axes.stored]]:
        return LookupsChoice()
    nodes: list[tuple[BodyPath, int]] = []
    places, at_once, saves = dict[str, None](), set[int](), 0
    for path, node, lookup, times in _found(*made, axes, (), 1):
        saved = _saved(node, lookup)
        if saved > 0:
            nodes.append((path, node.outputs[0]))
            at_once.add(lookup.requests.at_once)
            places[where(node.eqn)] = None
            saves += times * saved
    before = sent(*made, axes, unknown=ASKED_ROUNDS)
    if not nodes or saves < _least(before):
        return LookupsChoice()
    program = with_requests(program, nodes, axes)
    most = min(at_once), max(at_once)
    return LookupsChoice(program, tuple(places), most, sent(*made, axes))


def are_worth(one: Made, other: Made, axes: Axes) -> bool:
    """Whether a plan with rows asked of their owners is better than one without, also
    in `ASKED_ROUNDS` rounds."""
    after, before = (sent(*made, axes, unknown=ASKED_ROUNDS) for made in (one, other))
    if before.price - after.price < _least(before):
        return False
    return live_bytes(*one, axes) - live_bytes(*other, axes) <= STATIONARY_LIVE


def _least(before: Sent) -> float:
    """The bytes that have to be saved."""
    return max(STATIONARY_BYTES, STATIONARY_SHARE * before.bytes)


def _saved(node: Node, lookup: Lookup) -> int:
    """What a device may send less in a run of a lookup, whose rows it takes from all
    others otherwise, or all of the table."""
    requests = lookup.requests
    made = nbytes(node.eqn.invars[0].aval)
    row = made // requests.rows
    now = min(made, requests.devices * requests.lookups * row)
    return now - ASKED_ROUNDS * requests.round_bytes(row)


def _found(
    program: Program, body: BodyPlan, axes: Axes, path: BodyPath, times: int
) -> Iterator[tuple[BodyPath, Node, Lookup, int]]:
    """The lookups in rows of the state, the body that each is in, and how often it
    runs."""
    moves = {step.result: step for step in body.steps if isinstance(step, Reshard)}
    summed = {step.source.value for step in moves.values() if _sums(step, axes)}
    for step in body.steps:
        if not isinstance(step, Apply):
            continue
        node = program.nodes[step.node]
        for k, inner in enumerate(zip(node.bodies, step.bodies, strict=True)):
            runs = times * (step.times or 1)
            yield from _found(*inner, axes, (*path, *node.outputs[:1], k), runs)
        if node.kind != "op" or not step.operands:
            continue
        lookup = lookup_of(program, node, axes)
        table = step.operands[0]
        if lookup is None or table is None:
            continue
        is_zero, gradient = node.kinds[0] == ZERO, number_of(node.outputs[0])
        of_leaf, ways = bool(program.leaf(table.value)), [step.operand_shardings[0]]
        if table in moves:
            of_leaf |= moves[table].stored
            ways.append(moves[table].path[0])
        has_rows = any(_has_rows(sharding, axes, of_leaf) for sharding in ways)
        if has_rows or (is_zero and gradient in summed):
            yield path, node, lookup, times


def _sums(step: Reshard, axes: Axes) -> bool:
    """Whether a move sums terms, and leaves rows of the sum where a leaf has them."""
    start = step.path[0][axes.stored]
    return isinstance(start, Unreduced) and _has_rows(step.path[-1], axes, False)


def _has_rows(sharding: Sharding, axes: Axes, of_leaf: bool) -> bool:
    """Whether rows are split of what is a leaf of the state, or is split like one."""
    state = sharding[axes.stored]
    if not isinstance(state, Split) or state.dim != 0:
        return False
    return of_leaf or state.stored or state.stationary
