"""What is moved by the gathers of a part that a loop runs ahead.

In: a program, and the part of a plan of it. Out: its gathers of what is there before
any of them is made. These may wait for something in the iteration that they are made
in; the plan lets them, and its lowering takes their operands out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardfn._core.plan import Apply, BodyPlan, Ref, Reshard, Site, reads
from shardfn._core.program import Program
from shardfn._core.sharding import Sharding
from shardfn._core.step_order import made_by
from shardfn._schedule.bodies import given_to

Kind = tuple[Any, Sharding]
"""What a value is like, and how it is sharded."""


@dataclass(frozen=True, slots=True)
class Moved:
    """What a gather of a part moves.

    Attributes:
      site: where the gather is.
      origin: one of the versions that come in of which the part makes it.
      kind: what it is like.
    """

    site: Site
    origin: Ref
    kind: Kind


def moved_ahead(program: Program, part: BodyPlan) -> list[Moved]:
    """What the gathers of a part, and of calls in it, move, once for each value; but
    for what is made of what another has gathered: that waits with it.

    Args:
      program: the program.
      part: of a plan of it.

    Returns:
      Each, in the order of the part.
    """
    found: list[Moved] = []
    inputs = (*map(Ref, program.inputs), *part.imports)
    _follow(program, part, {ref: ref for ref in inputs}, (), found)
    return found


def _follow(
    program: Program,
    part: BodyPlan,
    given: Mapping[Ref, Ref],
    within: tuple[int, ...],
    found: list[Moved],
) -> dict[Ref, Ref]:
    """Adds what a part moves; what it knows in the end, by what that is made of.

    Args:
      program: the program.
      part: of a plan of it.
      given: what comes in from outside, by its names here.
      within: in which calls this is.
      found: what is added to.
    """
    known, seen = dict(given), set[Ref]()
    literal = {Ref(value) for value, _ in program.constants}
    for step in part.steps:
        is_known = known.keys() | literal >= {*reads(step)}
        origin = next((known[ref] for ref in reads(step) if ref in known), None)
        made = made_by(program, step)
        if isinstance(step, Reshard) and not step.is_local:
            if step.gathers_state and step.source in known.keys() - seen:
                seen.add(step.source)
                kind = program.avals[step.source.value], step.path[0]
                site = within, step.result
                found.append(Moved(site, known[step.source], kind))
        elif isinstance(step, Apply) and program.nodes[step.node].is_call:
            (called,), (inner,) = program.nodes[step.node].bodies, step.bodies
            inside = (*within, step.node)
            after = _follow(called, inner, given_to(called, step, known), inside, found)
            exported = zip(step.exports, inner.exports, strict=True)
            known |= {ref: after[x] for ref, x in exported if x in after}
        elif is_known and origin is not None:
            known |= dict.fromkeys(made, origin)
        elif is_known:
            literal |= {*made}
    return known
