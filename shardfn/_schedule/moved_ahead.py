"""What is moved by the gathers of a part that a loop runs ahead.

In: a program, and the part of a plan of it. Out: its gathers of what is there before
any of them is made. These may wait for something in the iteration that they are made
in; the plan lets them, and its lowering takes their operands out.
"""

from dataclasses import dataclass
from typing import Any

from shardfn._core.plan import Apply, BodyPlan, Ref, Reshard, Site, reads
from shardfn._core.program import Program
from shardfn._core.sharding import Sharding
from shardfn._core.step_order import made_by
from shardfn._schedule.bodies import given_to, literals_of

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


_Known = dict[Ref, Ref | None]
"""What is there before anything is gathered, by a version that comes in of which it is
made; None if it is made of none."""


def _follow(
    program: Program,
    part: BodyPlan,
    given: _Known,
    within: tuple[int, ...],
    found: list[Moved],
) -> _Known:
    """Adds what a part moves.

    Args:
      program: the program.
      part: of a plan of it.
      given: what comes in from outside, by its names here.
      within: in which calls this is.
      found: what is added to.

    Returns:
      What is known behind it.
    """
    known, seen = dict(given), set[Ref]()
    known |= dict.fromkeys((Ref(value) for value, _ in program.constants), None)
    for step in part.steps:
        is_known = known.keys() >= {*reads(step)}
        if isinstance(step, Reshard) and not step.is_local:
            origin = known.get(step.source)
            if step.gathers_state and origin and step.source not in seen:
                seen.add(step.source)
                kind = program.avals[step.source.value], step.path[0]
                found.append(Moved((within, step.result), origin, kind))
        elif isinstance(step, Apply) and program.nodes[step.node].is_call:
            (called,), (inner,) = program.nodes[step.node].bodies, step.bodies
            entering: _Known = dict.fromkeys(literals_of(called, step), None)
            entering |= given_to(called, step, known)
            after = _follow(called, inner, entering, (*within, step.node), found)
            exported = zip(step.exports, inner.exports, strict=True)
            known |= {ref: after[x] for ref, x in exported if x in after}
        elif is_known:
            origins = (known[ref] for ref in reads(step) if known[ref])
            known |= dict.fromkeys(made_by(program, step), next(origins, None))
    return known
