"""A planned program as a list of collectives that people can read.

In: a program and its plan, tree paths of the state leaves. Out: one `Collective` per
move on the wire, with the state leaf that it belongs to, the source line, and M.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardfn._core.automatic_axes import part_shape
from shardfn._core.control import Control
from shardfn._core.host_values import copies_itself
from shardfn._core.leaves import Leaf, Names, leaf_name, names_text
from shardfn._core.line_names import line_name
from shardfn._core.memories import HOST
from shardfn._core.moves import AllGather, scatters_of
from shardfn._core.offloading import OffloadChoice
from shardfn._core.phases import UPDATE
from shardfn._core.plan import Apply, BodyPlan, Ref, Reshard
from shardfn._core.program import Program
from shardfn._core.quantized import SCALE_BYTES
from shardfn._core.sent_bytes import communicating_moves
from shardfn._core.sharding import Axes, Sharding, Split, stored_shape
from shardfn._core.sizes import is_key_name, key_word
from shardfn._core.step_order import together
from shardfn.analysis._computed_alike import computed_alike
from shardfn.analysis._explain import DUPLICATED, LeafLayout, Operation
from shardfn.analysis._live_runs import Runs, count_runs
from shardfn.analysis._move_reason import Why, note_text
from shardfn.analysis._replicated import work_of
from shardfn.analysis._surroundings import ALONE, Surroundings
from shardfn.analysis._text import shape_text
from shardfn.analysis._times import Times
from shardfn.analysis._users import users_of
from shardfn.analysis.collective import Collective
from shardfn.analysis.host_transfer import host_leaves, host_transfers
from shardfn.analysis.plan import Plan

Gathered = tuple[Names, int, int]
"""Leaves of a gathered parameter, its bytes, and those of one element."""

Line = tuple[Collective, tuple[Gathered, ...]]
"""A collective, and the parameters that it gathers."""


def make_plan(
    program: Program,
    body: BodyPlan,
    axes: Axes,
    control: Control,
    fingerprint: str,
    operations: str,
    state: Sequence[Leaf],
    notes: tuple[str, ...] = (),
    layouts: Sequence[tuple[Sharding, str]] = (),
    offload: OffloadChoice | None = None,
    returns: Sequence[bool] = (),
) -> Plan:
    """Describes a planned step.

    Args:
      program: the traced step, its values named after leaves of the state.
      body: its plan.
      axes: the mesh axes.
      control: what was asked of the moves of state leaves.
      fingerprint: what identifies the planned step; see `_program_hash`.
      operations: the hash of the operations of the step as it was traced.
      state: leaves of the state.
      notes: what people should know besides.
      layouts: how each leaf is stored, and why.
      offload: which leaves were chosen for the host's memory, if any were to be.
      returns: for each leaf of the state, whether it comes back; all do if left out.

    Returns:
      The plan with its collectives and M.
    """
    parameters = _Parameters({leaf_name(leaf.path): leaf for leaf in state})
    collectives = []
    counted = count_runs(program, body)
    for line, gathered in _walk(program, body, axes, Times(), counted):
        collectives.append(line)
        for each in gathered:
            parameters.add(line, *each)
    return Plan(
        axes=axes,
        body=body,
        collectives=tuple(collectives),
        parameter_bytes=sum(parameters.bytes.values()),
        program=fingerprint,
        control=control,
        work=work_of(program, body, axes),
        notes=notes,
        operations=tuple(_operations(program, body)),
        transfers=tuple(host_transfers(program, body, state, axes)),
        copies_itself=copies_itself(program),
        on_host=host_leaves(state, body.inputs, axes, returns),
        offload=offload,
        operations_hash=operations,
        leaves=tuple(
            LeafLayout(
                leaf_name(leaf.path),
                tuple(leaf.aval.shape),
                str(leaf.aval.dtype),
                _stored_text(leaf, sharding, axes),
                why,
            )
            for leaf, (sharding, why) in zip(state, layouts, strict=False)
        ),
    )


def _operations(program: Program, body: BodyPlan) -> Iterator[Operation]:
    """Every node of a plan that runs, the factors of it that are split, and what passes
    did to what it makes."""
    notes = defaultdict[Ref, list[str]](list)
    for ref in body.duplicated:
        notes[ref].append(DUPLICATED)
    for step in body.steps:
        if isinstance(step, Reshard) and not step.moves:
            notes[step.source] += map(note_text, step.notes)
    for step in body.steps:
        if isinstance(step, Apply):
            node = program.nodes[step.node]
            made = (notes[Ref(value)] for value in node.outputs)
            yield node, step.parts, tuple(itertools.chain(*made))
            for inner in zip(node.bodies, step.bodies, strict=True):
                yield from _operations(*inner)


def _stored_text(leaf: Leaf, sharding: Sharding, axes: Axes) -> str:
    """Over which axes a leaf is split, in which shape if that is another, and where it
    lives."""
    splits = [
        f"over {name} along dimension {s.dim}"
        if s.dim >= 0
        else f"over {name} flattened"
        for name, s in zip(axes.names, sharding, strict=True)
        if isinstance(s, Split)
    ]
    text = f"stored split {', '.join(splits)}" if splits else "whole on every device"
    shape = stored_shape(leaf.aval.shape, sharding, axes)
    if shape != leaf.aval.shape:
        how = "padded to" if math.prod(shape) > leaf.aval.size else "as"
        text += f", {how} {shape_text(shape)}"
    return f"{text}, in the host's memory" if leaf.memory == HOST else text


@dataclass(frozen=True, slots=True)
class _Parameters:
    """The bytes of what forward and backward passes gather, each parameter once.

    A pass may gather a parameter part by part, in a loop or where layers are written
    out, or the same one in each iteration: it has no more bytes than its leaf. What
    belongs to no leaf goes by its line.
    """

    leaves: Mapping[str, Leaf]
    bytes: dict[Hashable, int] = field(default_factory=dict)
    parts: dict[tuple[str, str], dict[Hashable, int]] = field(default_factory=dict)

    def add(self, line: Collective, names: Names, size: int, itemsize: int) -> None:
        total = size * line.each
        if line.phase == UPDATE:
            return
        if not names:
            self.most((line.shape, line.place), total)
        for name in names:
            leaf = self.leaves[name]
            whole = math.prod(part_shape(leaf.aval.shape, leaf.auto or ())) * itemsize
            parts = self.parts.setdefault((name, line.phase), {})
            parts[line.value] = max(parts.get(line.value, 0), total)
            alone = min(sum(parts.values()), max(whole, size))
            self.most(name, alone if len(names) == 1 else whole)

    def most(self, key: Hashable, size: int) -> None:
        self.bytes[key] = max(self.bytes.get(key, 0), size)


def _walk(
    program: Program,
    body: BodyPlan,
    axes: Axes,
    times: Times,
    counted: Runs | None,
    at: Surroundings = ALONE,
) -> Iterator[Line]:
    """Every collective that runs, `times` times if not `counted`, and the bytes of the
    parameters that it gathers."""
    users, first = users_of(program, body), computed_alike(program, at.alike)
    for index, step in enumerate(body.steps):
        if isinstance(step, Reshard):
            runs = times if counted is None else counted.get((at.place, index))
            if runs is None:
                continue
            steps = together(body.steps, index)
            each = [
                list(_moves(program, s, users.get(s.result), axes, runs, at, first))
                for s in steps
            ]
            yield from map(_joined, zip(*each, strict=True))
            continue
        node = program.nodes[step.node]
        inner = times.each(step.times)
        for ahead in step.ahead:
            runs = times.each((step.times or 0) + ahead.lead)
            place = Surroundings((*at.place, step.node, 0))
            for line, found in _walk(
                node.bodies[0], ahead.part, axes, runs, None, place
            ):
                yield replace(line, ahead=ahead.lead), found
        for i, plan in enumerate(step.bodies):
            place = at.within(node, i, step.node, times.per_step, first)
            yield from _walk(node.bodies[i], plan, axes, inner, counted, place)


def _moves(
    program: Program,
    step: Reshard,
    user: tuple[str, str] | None,
    axes: Axes,
    times: Times,
    at: Surroundings,
    first: Mapping[int, int],
) -> Iterator[Line]:
    place, fallback = user or ("", "")
    moved = step.source.value
    names = program.leaf(moved)
    size = math.prod(step.part_shape) * step.itemsize
    words = step.itemsize // key_word() if is_key_name(step.dtype) else 1
    outside = at.runs_outside(moved)
    rounds = at.runs_of_rounds(moved)
    for index, move in communicating_moves(step, axes):
        gathers = isinstance(move, AllGather) and step.stored
        how, each = move.quantized, move.sent_itemsize(step.itemsize)
        scale_bytes = move.scale_bytes(step.part_shape, axes)
        scales = move.scales_shape(step.part_shape)
        for message in move.messages(step.part_shape, axes):
            yield (
                Collective(
                    op=message.op,
                    axis=axes.named(move.over),
                    phase=step.phase,
                    shape=step.part_shape,
                    dtype=step.dtype if how is None else how.dtype,
                    wire_bytes=round(
                        message.sent * each + (scale_bytes if scales else 0)
                    ),
                    scale_bytes=round(scale_bytes),
                    block=0 if how is None else how.block,
                    times=times.each(message.times).per_step,
                    each=times.count * message.times,
                    path=names_text(names),
                    place=place,
                    fallback=fallback,
                    name=line_name(at.place, step.result, index),
                    elements=message.elements * words,
                    scales=move.elements(scales, axes) if scales else 0,
                    devices=message.devices,
                    reduces=move.reduces,
                    gradient=step.during.gradient,
                    undelayed=step.undelayed or index < scatters_of(step.moves),
                    used_first=step.used_first,
                    value=at.identity(moved),
                    alike=at.identity(first.get(moved, moved)),
                    body=at.place,
                    hoisted=frozenset(n * message.times for n in outside),
                    unrolled=frozenset(n * message.times for n in rounds),
                    why=(Why(names, step, move, axes),),
                ),
                ((names, size, step.itemsize),) if gathers else (),
            )


def _joined(lines: Sequence[Line]) -> Line:
    """One line for moves that are one collective."""
    first = lines[0][0]
    if len(lines) == 1:
        return lines[0]
    each = [line for line, _ in lines]
    gathered = tuple(itertools.chain(*(found for _, found in lines)))
    line = replace(
        first,
        shape=(sum(math.prod(line.shape) for line in each),),
        wire_bytes=sum(line.wire_bytes for line in each),
        scale_bytes=sum(line.scale_bytes for line in each),
        path=names_text([line.path for line in each]),
        elements=sum(line.elements + line.scales * SCALE_BYTES for line in each),
        scales=0,
        parts=tuple((line.path, line.wire_bytes) for line in each),
        why=tuple(itertools.chain(*(line.why for line in each))),
        hoisted=frozenset.intersection(*(line.hoisted for line in each)),
        unrolled=frozenset.intersection(*(line.unrolled for line in each)),
    )
    return line, gathered
