"""Keeps what the forward pass gathered for the backward pass, where the user asks.

In: a plan with both passes, its gathers inside scans and remats. Out: the plan, in
which the forward pass hands out what it gathered (a scan stacks it, layer by layer) and
the backward pass takes it in place of a gather of its own.

The two stand in different bodies, so they are matched by where their operand comes
from: the same leaf, layer by layer, through the same casts and transposes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardfn._control import Control
from shardfn._phase import FORWARD
from shardfn._plan import Apply, BodyPlan, Ref, Reshard, fresh, without_move
from shardfn._program import Program
from shardfn._schedule._origin import Frame, Origin, depth_of
from shardfn._sharding import Sharding

Place = tuple[int, ...]
"""Indices of the steps that hold a step, and of the step itself."""

_Key = tuple[Origin, tuple[Sharding, ...], str]
"""What is gathered, how, and in which dtype."""


@dataclass(frozen=True, slots=True)
class _Gather:
    """A gather that is to be kept: where it stands, what it makes, from what."""

    place: Place
    move: Reshard
    key: _Key


def keep(program: Program, body: BodyPlan, control: Control) -> BodyPlan:
    """Replaces gathers of the backward pass by those of the forward pass.

    Args:
      program: a program that holds both passes.
      body: its plan; the plans inside are scheduled already.
      control: which leaves to keep.

    Returns:
      The plan. Gathers of one body are left to `share`.
    """
    first: dict[_Key, _Gather] = {}
    kept: list[tuple[_Gather, _Gather]] = []
    for found in _gathers(Frame(program), body, control):
        if found.move.phase == FORWARD:
            first.setdefault(found.key, found)
        elif len(found.place) > 1 and found.key in first:
            kept.append((first[found.key], found))
    versions: dict[Place, Ref] = {}
    for source, _ in kept:
        if source.place not in versions:
            body, versions[source.place] = _export(program, body, source.place)
    for source, user in reversed(kept):
        body = _import(program, body, user.place, versions[source.place])
    return body


def _gathers(
    frame: Frame, body: BodyPlan, control: Control, place: Place = (), loops: int = 0
) -> Iterator[_Gather]:
    """The gathers to keep, in the order in which they run."""
    for index, step in enumerate(body.steps):
        at = (*place, index)
        if isinstance(step, Reshard):
            leaf = frame.program.leaf(step.source.value)
            asked = control.of(leaf).reshard_after_forward
            if asked is not False or not step.gathers_state or step.source.version:
                continue
            origin = frame.origin(step.source.value)
            if depth_of(origin) == loops:
                yield _Gather(at, step, (origin, step.path, step.dtype))
            continue
        node = frame.program.nodes[step.node]
        if node.kind in ("scan", "remat"):
            inner = frame.enter(node)
            depth = loops + (node.kind == "scan")
            yield from _gathers(inner, step.bodies[0], control, at, depth)


def _export(program: Program, body: BodyPlan, place: Place) -> tuple[BodyPlan, Ref]:
    """The plan handing out what the move at `place` makes, and the version it is
    here."""
    step = body.steps[place[0]]
    if isinstance(step, Reshard):
        return body, step.result
    node = program.nodes[step.node]
    inner, inside = _export(node.bodies[0], step.bodies[0], place[1:])
    outside = fresh(body, node.outputs[0])
    inner = replace(inner, exports=(*inner.exports, inside))
    step = replace(step, bodies=(inner,), exports=(*step.exports, outside))
    return _with_step(body, place[0], step), outside


def _import(program: Program, body: BodyPlan, place: Place, ref: Ref) -> BodyPlan:
    """The plan using version `ref`, made outside, in place of the move at `place`."""
    step = body.steps[place[0]]
    if isinstance(step, Reshard):
        return without_move(body, step, ref)
    node = program.nodes[step.node]
    inner = step.bodies[0]
    if ref in step.imports:
        inside = inner.imports[step.imports.index(ref)]
    else:
        inside = fresh(inner, ref.value)
        inner = replace(inner, imports=(*inner.imports, inside))
        step = replace(step, imports=(*step.imports, ref))
    inner = _import(node.bodies[0], inner, place[1:], inside)
    return _with_step(body, place[0], replace(step, bodies=(inner,)))


def _with_step(body: BodyPlan, index: int, step: Apply) -> BodyPlan:
    steps = (*body.steps[:index], step, *body.steps[index + 1 :])
    return replace(body, steps=steps)
