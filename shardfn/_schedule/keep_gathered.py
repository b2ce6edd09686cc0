"""Keeps what the forward pass gathered for the backward pass, where the user asks.

In: a plan with both passes, its gathers inside scans and remats. Out: the plan, in
which the forward pass hands out what it gathered (a scan stacks it, layer by layer) and
the backward pass takes it in place of a gather of its own. Or each device keeps a part
of it, and the backward pass gathers the parts of a group of neighbours.

The two stand in different bodies, so they are matched by where their operand comes
from: the same leaf, layer by layer, through the same casts and transposes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardfn._core.control import Control
from shardfn._core.phases import FORWARD
from shardfn._core.plan import BodyPlan, Ref, Reshard, Step
from shardfn._core.program import Program
from shardfn._core.quantized import Quantized
from shardfn._core.reasons import Note, noted
from shardfn._core.sharding import Sharding, Split, on_axis
from shardfn._schedule.value_origins import Origin, Scope, depth_of
from shardfn._schedule.versions import fresh, without_moves

StepPath = tuple[int, ...]
"""Indices of the steps that hold a step, and of the step itself."""

_Key = tuple[Origin, tuple[Sharding, ...], str, tuple[Quantized | None, ...]]
"""What is gathered, how, in which dtype, and how quantized."""


@dataclass(frozen=True, slots=True)
class _Gather:
    """A gather that is to be kept: where it stands, what it makes, from what."""

    place: StepPath
    move: Reshard
    key: _Key
    group: int

    @property
    def reason(self) -> str:
        """What is done with it, for people."""
        if self.group:
            return f"reshard_after_forward={self.group} keeps a part of it"
        return "reshard_after_forward=False keeps it"

    @property
    def part(self) -> Reshard:
        """The move that leaves a device its part of what this one makes."""
        whole = self.move.path[-1]
        splits = [s for s in self.move.path[0] if isinstance(s, Split)]
        part = on_axis(whole, len(whole) - 1, Split(splits[-1].dim, group=self.group))
        source = self.move.result
        return replace(
            self.move,
            source=source,
            result=Ref(source.value, -1 - source.version),
            path=(whole, part),
            stored=False,
            after=None,
        )


def keep_gathered(program: Program, body: BodyPlan, control: Control) -> BodyPlan:
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
    for found in _gathers(Scope(program), body, control):
        source = first.get(found.key)
        if source is None:
            if found.move.phase == FORWARD:
                first[found.key] = found
        elif found.move.during != source.move.during:
            if len(found.place) > 1 or found.group:
                kept.append((source, found))
    versions: dict[StepPath, Ref] = {}
    for source, user in kept:
        if source.place not in versions or len(user.place) == 1:
            value = user.move.source.value if len(user.place) == 1 else None
            note = Note("keep_gathered", source.reason, (), user.move.cause)
            body, versions[source.place] = _export(program, body, source, note, value)
    for source, user in reversed(kept):
        body = _import(program, body, user, source, versions[source.place])
    parted = {source.place: source for source, _ in kept if source.group}
    for place in sorted(parted, reverse=True):
        body = _insert(body, place, parted[place])
    return body


def _gathers(
    frame: Scope, body: BodyPlan, control: Control, place: StepPath = (), loops: int = 0
) -> Iterator[_Gather]:
    """The gathers to keep, in the order in which they run."""
    for index, step in enumerate(body.steps):
        at = (*place, index)
        if isinstance(step, Reshard):
            leaf = frame.program.leaf(step.source.value)
            asked = control.of(*leaf).reshard_after_forward
            group = asked if type(asked) is int else 0
            if asked is not False and not group:
                continue
            if not step.gathers_state or step.source.version:
                continue
            origin = frame.origin(step.source.value)
            if depth_of(origin) == loops:
                key = origin, step.path, step.dtype, step.written
                yield _Gather(at, step, key, group)
            continue
        node = frame.program.nodes[step.node]
        if node.kind in ("scan", "remat"):
            inner = frame.enter(node)
            depth = loops + (node.kind == "scan")
            yield from _gathers(inner, step.bodies[0], control, at, depth)


def _export(
    program: Program,
    body: BodyPlan,
    found: _Gather,
    note: Note,
    value: int | None = None,
    depth: int = 0,
) -> tuple[BodyPlan, Ref]:
    """The plan handing out what a gather leaves, and the version that it is here: one
    of `value`, if that is given."""
    index = found.place[depth]
    step = body.steps[index]
    if isinstance(step, Reshard):
        kept = replace(step, notes=noted(step, note))
        ref = found.part.result if found.group else step.result
        return _with_steps(body, index, kept), ref
    node = program.nodes[step.node]
    at = depth + 1
    inner, inside = _export(node.bodies[0], step.bodies[0], found, note, None, at)
    outside = fresh(body, node.outputs[0] if value is None else value)
    inner = replace(inner, exports=(*inner.exports, inside))
    step = replace(step, bodies=(inner,), exports=(*step.exports, outside))
    return _with_steps(body, index, step), outside


def _import(
    program: Program,
    body: BodyPlan,
    user: _Gather,
    source: _Gather,
    ref: Ref,
    depth: int = 0,
) -> BodyPlan:
    """The plan using version `ref`, made outside, in place of a gather."""
    index = user.place[depth]
    step = body.steps[index]
    if isinstance(step, Reshard):
        if not source.group:
            return without_moves(body, {step.result: ref})
        gather = replace(step, source=ref, path=source.part.path[::-1], after=None)
        return _with_steps(body, index, gather)
    node = program.nodes[step.node]
    inner = step.bodies[0]
    if ref in step.imports:
        inside = inner.imports[step.imports.index(ref)]
    else:
        is_last = depth + 2 == len(user.place)
        inside = fresh(inner, user.move.source.value if is_last else ref.value)
        inner = replace(inner, imports=(*inner.imports, inside))
        step = replace(step, imports=(*step.imports, ref))
    inner = _import(node.bodies[0], inner, user, source, inside, depth + 1)
    return _with_steps(body, index, replace(step, bodies=(inner,)))


def _insert(body: BodyPlan, place: StepPath, found: _Gather) -> BodyPlan:
    """The plan with a device's part cut behind a gather."""
    index, *rest = place
    step = body.steps[index]
    if isinstance(step, Reshard):
        return _with_steps(body, index, step, found.part)
    inner = _insert(step.bodies[0], tuple(rest), found)
    return _with_steps(body, index, replace(step, bodies=(inner,)))


def _with_steps(body: BodyPlan, index: int, *steps: Step) -> BodyPlan:
    """The plan with others in place of one step."""
    return replace(body, steps=(*body.steps[:index], *steps, *body.steps[index + 1 :]))
