"""Lookups in tables whose rows devices own: the rows are asked of their owners.

In: a program and its plan. Out: the program in which devices exchange requests and
rows, in rounds, where otherwise every device would give its part of all rows that are
looked up, or the table would be gathered. What a round sends is known; how many rounds
a step needs depends on the data (`_trace.row_requests`).
"""

from collections.abc import Set
from dataclasses import dataclass, field

from shardfn._core.errors import where
from shardfn._core.limits import (
    ASKED_ROUNDS,
    STATIONARY_LIVE,
)
from shardfn._core.plan import Apply, BodyPlan, Ref, Reshard
from shardfn._core.program import ZERO, Node, Program, number_of
from shardfn._core.sent_bytes import Made, sent
from shardfn._core.sharding import Axes, Sharding, Split
from shardfn._core.sizes import nbytes
from shardfn._lowering.constrained_values import BodyPath
from shardfn._lowering.exchanged_lookups import Lookup, lookup_of, with_requests
from shardfn._lowering.live_bytes import live_bytes
from shardfn._lowering.replanning import ProgramChoice, least_saved


@dataclass(frozen=True, slots=True)
class LookupsChoice(ProgramChoice):
    """What was found of lookups in tables whose rows devices own.

    Attributes:
      at_once: the least and the most rows that one device asks of one other in a round;
        what is sent is that of one round.
    """

    at_once: tuple[int, int] = (0, 0)

    @property
    def notes(self) -> tuple[str, ...]:
        """The plan's line about them."""
        if self.program is None:
            return ()
        before, after = self.sizes
        most = " to ".join(map(str, dict.fromkeys(self.at_once)))
        return (
            f"rows are asked of the devices that own them, at most {most} of each at "
            "once (limits.ASKED_SPREAD), in rounds until all are served: "
            f"{self.where}: {after} sent per step if one round "
            f"serves all, instead of {before}, and less even in {ASKED_ROUNDS} rounds "
            "(limits.ASKED_ROUNDS)",
        )


def with_lookups_exchanged(program: Program, made: Made, axes: Axes) -> LookupsChoice:
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
    search = _Search(axes)
    search.body(*made, (), 1, _Entering())
    for found in search.found:
        saved = _saved(found.node, found.lookup)
        if saved > 0:
            nodes.append((found.path, found.node.outputs[0]))
            at_once.add(found.lookup.requests.at_once)
            places[where(found.node.eqn)] = None
            saves += found.times * saved
    before = sent(*made, axes, unknown=ASKED_ROUNDS)
    if not nodes or saves < least_saved(before):
        return LookupsChoice()
    program = with_requests(program, nodes, axes)
    most = min(at_once), max(at_once)
    now = sent(*made, axes)
    return LookupsChoice(program, tuple(places), before=now, at_once=most)


def are_worth(one: Made, other: Made, axes: Axes) -> bool:
    """Whether a plan with rows asked of their owners is better than one without, also
    in `ASKED_ROUNDS` rounds."""
    after, before = (sent(*made, axes, unknown=ASKED_ROUNDS) for made in (one, other))
    if before.price - after.price < least_saved(before):
        return False
    return live_bytes(*one, axes) - live_bytes(*other, axes) <= STATIONARY_LIVE


def _saved(node: Node, lookup: Lookup) -> int:
    """What a device may send less in a run of a lookup, whose rows it takes from all
    others otherwise, or all of the table."""
    requests = lookup.requests
    made = nbytes(node.eqn.invars[0].aval)
    row = made // requests.rows
    now = min(made, requests.devices * requests.lookups * row)
    return now - ASKED_ROUNDS * requests.round_bytes(row)


@dataclass(frozen=True, slots=True)
class _Found:
    """A lookup in rows of the state: in which body, and how often it runs."""

    path: BodyPath
    node: Node
    lookup: Lookup
    times: int


@dataclass(frozen=True, slots=True)
class _Entering:
    """What is known of the arguments of a body.

    Attributes:
      rows: those whose rows are split like a leaf's, or were until they were gathered.
      invariant: those that are the same in each iteration of a loop.
    """

    rows: frozenset[int] = frozenset()
    invariant: frozenset[int] = frozenset()


@dataclass(slots=True)
class _Search:
    """The lookups of a plan.

    Attributes:
      axes: the mesh axes.
      found: those found so far.
      shapes: those of the tables.
    """

    axes: Axes
    found: list[_Found] = field(default_factory=list)
    shapes: set[tuple[int, ...]] = field(default_factory=set)

    def body(
        self,
        program: Program,
        body: BodyPlan,
        path: BodyPath,
        times: int,
        entering: _Entering,
    ) -> None:
        """Finds those in a body. What a loop looks up again in each iteration is left
        alone: a compiler asks for it once, in front of the loop."""
        moves = {step.result: step for step in body.steps if isinstance(step, Reshard)}
        invariant = set(entering.invariant)

        def has_rows(ref: Ref, sharding: Sharding | None) -> bool:
            of_leaf, ways = bool(program.leaf(ref.value)), [sharding]
            if ref in moves:
                of_leaf |= moves[ref].stored
                ways.append(moves[ref].path[0])
            splits = (s[self.axes.stored] for s in ways if s is not None)
            return ref.value in entering.rows or any(
                isinstance(split, Split)
                and split.dim == 0
                and (of_leaf or split.stored or split.stationary)
                for split in splits
            )

        for step in body.steps:
            if not isinstance(step, Apply):
                continue
            node = program.nodes[step.node]
            given = [number_of(atom) for atom in node.inputs]
            if invariant.issuperset(v for v in given if v >= 0) and invariant:
                invariant.update(node.outputs)
            asks = lookup_of(program, node, self.axes) if node.kind == "op" else None
            if asks is None and not node.bodies:
                continue
            operands = zip(given, step.operands, step.operand_shardings, strict=False)
            rows = {
                v for v, ref, at in operands if ref is not None and has_rows(ref, at)
            }
            for k, (inner, plan) in enumerate(
                zip(node.bodies, step.bodies, strict=True)
            ):
                at, runs = (*path, *node.outputs[:1], k), times * (step.times or 1)
                inside = _entering(node, k, inner, rows, invariant)
                self.body(inner, plan, at, runs, inside)
            if asks is None or given[1] in invariant:
                continue
            shape = (asks.requests.rows, *asks.row)
            is_gradient = node.kinds[0] == ZERO and shape in self.shapes
            if given[0] in rows or is_gradient:
                self.shapes.add(shape)
                self.found.append(_Found(path, node, asks, times))


def _entering(
    node: Node, k: int, inner: Program, rows: Set[int], invariant: Set[int]
) -> _Entering:
    """What is known of the arguments of a body of a node."""
    region = node.regions[k]
    given = region.entering([number_of(atom) for atom in node.inputs])
    same = region.constants if node.is_loop else range(len(given))
    whole = [i not in region.slices for i in range(len(given))]
    return _Entering(
        frozenset(
            v for i, v in enumerate(inner.inputs) if whole[i] and given[i] in rows
        ),
        frozenset(
            v
            for i, v in enumerate(inner.inputs)
            if i in same and (node.is_loop or given[i] in invariant)
        ),
    )
