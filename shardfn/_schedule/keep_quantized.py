"""Leaves in eight bits what is kept, or carried, until it is used.

In: a plan whose moves are quantized, shared and taken ahead. Out: the plan, in which a
quantized gather that leaves its body, or is used in another pass, makes elements and
scales: each use reads them, so half of what bfloat16 takes is in memory meanwhile.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from shardfn._core.control import Control
from shardfn._core.plan import Apply, BodyPlan, Ref, Reshard, reads
from shardfn._core.program import Program, mixes_passes
from shardfn._core.quantized import SCALE_BYTES
from shardfn._core.reasons import Note, noted
from shardfn._core.sharding import Axes, local_shape

KEPT = "kept in the eight bits that it moves in: {}, and {} once it is read"


def keep_quantized(
    program: Program, body: BodyPlan, control: Control, axes: Axes
) -> BodyPlan:
    """Leaves gathers in eight bits in a plan and the plans in it.

    Args:
      program: the step.
      body: its plan.
      control: which leaves are kept between the passes.
      axes: the mesh axes.

    Returns:
      The plan. That of a forward pass alone stays: it may be differentiated, and bits
      have no derivative.
    """
    return _marked(program, body, control, axes) if mixes_passes(program) else body


def _marked(program: Program, body: BodyPlan, control: Control, axes: Axes) -> BodyPlan:
    needed = set(body.exports) | set(_kept_here(program, body, control))
    made = {s.result: s for s in body.steps if isinstance(s, Reshard)}
    parts = [s for s in made.values() if s.result in needed and _cuts_blocks(s, axes)]
    needed |= {part.source for part in parts}
    stays = {r for r in needed if r in made and _is_written(program, made[r])}
    stays |= {part.result for part in parts if part.source in stays}
    return replace(body, steps=tuple(_steps(program, body, stays, control, axes)))


def _steps(
    program: Program, body: BodyPlan, stays: Iterable[Ref], control: Control, axes: Axes
) -> Iterator[Reshard | Apply]:
    for step in body.steps:
        if isinstance(step, Reshard) and step.result in stays:
            yield _in_bits(step, axes)
        elif isinstance(step, Apply) and step.bodies:
            programs = program.nodes[step.node].bodies
            pairs = zip(programs, step.bodies, strict=True)
            inner = tuple(_marked(p, plan, control, axes) for p, plan in pairs)
            ahead = tuple(
                replace(each, part=_marked(programs[0], each.part, control, axes))
                for each in step.ahead
            )
            yield replace(step, bodies=inner, ahead=ahead)
        else:
            yield step


def _kept_here(program: Program, body: BodyPlan, control: Control) -> Iterator[Ref]:
    """What gathers that are asked to be kept make that another pass reads."""
    moves = (s for s in body.steps if isinstance(s, Reshard))
    made = {s.result: s for s in moves if _is_kept(program, s, control)}
    for step in body.steps:
        if isinstance(step, Apply):
            backward = program.nodes[step.node].backward
            for ref in reads(step):
                if ref in made and ref != step.after:
                    if backward != made[ref].during.is_backward:
                        yield ref


def _is_kept(program: Program, step: Reshard, control: Control) -> bool:
    leaf = program.leaf(step.source.value)
    return control.of(*leaf).reshard_after_forward is False


def _is_written(program: Program, step: Reshard) -> bool:
    """Whether a move ends in elements and scales of the dtype that its value has."""
    own = str(getattr(program.avals[step.source.value], "dtype", ""))
    last = step.moves[-1] if step.moves else None
    packed = last is not None and last.packed_as is not None
    return step.gathers_state and packed and not step.auto and step.dtype == own


def _cuts_blocks(step: Reshard, axes: Axes) -> bool:
    """Whether a move leaves each device a part of whole blocks."""
    how = next((how for how in step.written if how), None)
    if not step.leaves_part or how is None or step.auto:
        return False
    local = local_shape(step.shape, step.path[-1], axes)[how.dim]
    return local % how.block == 0


def _in_bits(step: Reshard, axes: Axes) -> Reshard:
    how = next(how for how in reversed(step.written) if how)
    end = step.path[-1]
    elements = math.prod(local_shape(step.shape, end, axes))
    scales = math.prod(local_shape(how.scales(step.shape), end, axes))
    sizes = elements + SCALE_BYTES * scales, step.itemsize * elements
    note = Note("keep_quantized", KEPT, sizes)
    return replace(step, in_bits=True, notes=noted(step, note))
