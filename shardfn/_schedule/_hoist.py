"""Moves out of a loop what is the same in every iteration.

In: a scan or while step whose body moves loop constants. Out: the moves, in front of
  the
loop, and the loop. Weights that a body gathers in every iteration leave it only if all
of them together are small: a recurrent cell's do, a whole model's in a loop over
microbatches do not.
"""

import math
from dataclasses import replace

from shardfn._carry import LOOP_BYTES
from shardfn._plan import Apply, BodyPlan, Ref, Reshard, Step
from shardfn._program import Program
from shardfn._sharding import Axes


def hoist(program: Program, step: Apply, axes: Axes) -> list[Step]:
    """The loop `step` with what moves out of it in front."""
    node = program.nodes[step.node]
    if node.kind == "remat" or node.kind == "cond":
        return [step]
    body = 0 if node.kind == "scan" else 1
    first = 0 if node.kind == "scan" else node.counts[0]
    count = node.counts[0] if node.kind == "scan" else node.counts[1]
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
    weights = sum(math.prod(s.shape) * s.itemsize for _, s in found if s.gathers_state)
    if weights > LOOP_BYTES:
        found = [(i, s) for i, s in found if not s.gathers_state]
    out: list[Step] = []
    for i, move in found:
        operand = step.operands[first + i]
        if operand is None:
            continue
        outside = Ref(operand.value, _fresh(step, operand, i))
        out.append(replace(move, source=operand, result=outside, after=None))
        plan = _without(plan, move, i)
        step = _with_operand(step, first + i, outside, move)
    bodies = tuple(plan if i == body else b for i, b in enumerate(step.bodies))
    return [*out, replace(step, bodies=bodies)]


def _fresh(step: Apply, operand: Ref, i: int) -> int:
    """A version number that no other step uses: one range per loop and constant."""
    return 1_000_000 * (step.node + 1) + 1_000 * i + operand.version


def _is_only_use(plan: BodyPlan, move: Reshard) -> bool:
    """Whether nothing in the body needs the constant as it comes in."""
    for step in plan.steps:
        if isinstance(step, Reshard):
            if step is not move and move.source in (step.source, step.after):
                return False
        elif move.source in step.operands:
            return False
    return move.source not in plan.outputs


def _without(plan: BodyPlan, move: Reshard, i: int) -> BodyPlan:
    """The body taking constant `i` as moved."""

    def renamed(ref: Ref | None) -> Ref | None:
        return move.source if ref == move.result else ref

    steps: list[Step] = []
    for step in plan.steps:
        if isinstance(step, Reshard):
            if step.result == move.result:
                continue
            source, after = renamed(step.source), renamed(step.after)
            assert source is not None
            steps.append(replace(step, source=source, after=after))
        else:
            steps.append(replace(step, operands=tuple(map(renamed, step.operands))))
    inputs = tuple(move.path[-1] if j == i else s for j, s in enumerate(plan.inputs))
    return replace(
        plan,
        inputs=inputs,
        steps=tuple(steps),
        outputs=tuple(map(renamed, plan.outputs)),
    )


def _with_operand(step: Apply, position: int, ref: Ref, move: Reshard) -> Apply:
    operands = (*step.operands[:position], ref, *step.operands[position + 1 :])
    shardings = tuple(
        move.path[-1] if j == position else s
        for j, s in enumerate(step.operand_shardings)
    )
    return replace(step, operands=operands, operand_shardings=shardings)
