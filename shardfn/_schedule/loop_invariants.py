"""Moves out of a loop what is the same in every iteration, and out of a call its moves.

In: a scan, while or custom step whose body moves constants. Out: the moves, in front of
the step, and the step. Weights that a body gathers in every iteration leave a loop only
if all of them together are small: a recurrent cell's do, a whole model's in a loop over
microbatches do not, unless `reshard_after_forward` says so. Out of a call they always
move: the compiler inlines it, and would merge them with equal moves outside.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardfn._core.leaf_options import Control
from shardfn._core.limits import LOOP_BYTES
from shardfn._core.phases import mixes_passes
from shardfn._core.plan import Apply, BodyPlan, Ref, Reshard, Step, reads, without_move
from shardfn._core.program import Program


def hoist(
    program: Program, step: Apply, control: Control, versions: Iterator[int]
) -> list[Step]:
    """`step` with what moves out of its body in front, as versions of these numbers."""
    node = program.nodes[step.node]
    if node.kind not in ("scan", "while", "custom"):
        return [step]
    body, first = (1, node.counts[0]) if node.kind == "while" else (0, 0)
    count = {"scan": node.counts[0], "while": node.counts[1]}.get(
        node.kind, len(node.inputs)
    )
    plan = step.bodies[body]
    constants = {v: i for i, v in enumerate(node.bodies[body].inputs[:count])}
    found = [
        (constants[s.source.value], s)
        for s in plan.steps
        if isinstance(s, Reshard)
        and s.source == Ref(s.source.value)
        and s.source.value in constants
        and _is_only_use(plan, s)
    ]
    if node.kind != "custom":
        leaving = _leaving(node.bodies[body], [s for _, s in found], control)
        found = [(i, s) for i, s in found if s in leaving]
    out: list[Step] = []
    for i, move in found:
        operand = step.operands[first + i]
        if operand is None:
            continue
        outside = Ref(operand.value, next(versions))
        out.append(replace(move, source=operand, result=outside, after=None))
        plan = _without(plan, move, i)
        step = _with_operand(step, first + i, outside, move)
    bodies = tuple(plan if i == body else b for i, b in enumerate(step.bodies))
    return [*out, replace(step, bodies=bodies)]


def _leaving(
    body: Program, moves: Sequence[Reshard], control: Control
) -> list[Reshard]:
    """The moves of loop constants that leave the loop.

    A gather that is to be repeated after the forward pass stays in a loop that holds
    both passes, one that is not leaves every loop; the others leave if they are small.
    """
    out, others = [], []
    mixes = mixes_passes(body)
    for move in moves:
        leaf = body.leaf(move.source.value)
        asked = control.of(leaf).reshard_after_forward
        if not move.gathers_state or asked is False:
            out.append(move)
        elif not (asked is True and mixes):
            others.append(move)
    small = sum(math.prod(s.shape) * s.itemsize for s in others) <= LOOP_BYTES
    return [*out, *others] if small else out


def _is_only_use(plan: BodyPlan, move: Reshard) -> bool:
    """Whether nothing in the body needs the constant as it comes in."""
    if any(move.source in reads(step) for step in plan.steps if step != move):
        return False
    return move.source not in (*plan.outputs, *plan.exports)


def _without(plan: BodyPlan, move: Reshard, i: int) -> BodyPlan:
    """The body taking constant `i` as moved."""

    plan = without_move(plan, move, move.source)
    inputs = tuple(move.path[-1] if j == i else s for j, s in enumerate(plan.inputs))
    return replace(plan, inputs=inputs)


def _with_operand(step: Apply, position: int, ref: Ref, move: Reshard) -> Apply:
    operands = (*step.operands[:position], ref, *step.operands[position + 1 :])
    shardings = tuple(
        move.path[-1] if j == position else s
        for j, s in enumerate(step.operand_shardings)
    )
    return replace(step, operands=operands, operand_shardings=shardings)
