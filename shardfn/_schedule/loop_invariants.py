"""Moves out of a loop what is the same in every iteration, and out of a call its moves.

In: a scan, while or custom step whose body moves constants. Out: the moves, in front of
the step, and the step. Weights that a body gathers in every iteration leave a loop only
if all of them together are small: a recurrent cell's do, a whole model's in a loop over
microbatches do not, unless `reshard_after_forward` says so. Out of a call they always
move: the compiler inlines it, and would merge them with equal moves outside.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from shardfn._core.control import Control
from shardfn._core.limits import LOOP_BYTES
from shardfn._core.plan import Apply, BodyPlan, Ref, Reshard, Step, reads, without_moves
from shardfn._core.program import Program, mixes_passes


def hoist(
    program: Program, step: Apply, control: Control, versions: Iterator[int]
) -> list[Step]:
    """`step` with what moves out of its body in front, as versions of these numbers."""
    node = program.nodes[step.node]
    if not node.is_loop and node.kind != "custom":
        return [step]
    body = len(node.bodies) - 1  # of a while loop not the test
    plan, region = step.bodies[body], node.regions[body]
    constants = {node.bodies[body].inputs[i]: i for i in region.constants}
    readers = Counter(ref for s in plan.steps for ref in set(reads(s)))
    readers.update(ref for ref in (*plan.outputs, *plan.exports) if ref is not None)
    found = [
        (constants[s.source.value], s)
        for s in plan.steps
        if isinstance(s, Reshard)
        and s.source == Ref(s.source.value)
        and s.source.value in constants
        and readers[s.source] == 1
    ]
    if node.kind != "custom":
        moves = _leaving(node.bodies[body], [s for _, s in found], control)
        leaving = {move.result for move in moves}
        found = [(i, s) for i, s in found if s.result in leaving]
    out: list[Step] = []
    moved: dict[int, Reshard] = {}
    operands, shardings = list(step.operands), list(step.operand_shardings)
    for i, move in found:
        at = region.operands[i]
        operand = operands[at]
        if operand is None:
            continue
        outside = Ref(operand.value, next(versions))
        out.append(replace(move, source=operand, result=outside, after=None))
        operands[at], shardings[at] = outside, move.path[-1]
        moved[i] = move
    plan = _without(plan, moved)
    step = replace(
        step,
        operands=tuple(operands),
        operand_shardings=tuple(shardings),
        bodies=tuple(plan if i == body else b for i, b in enumerate(step.bodies)),
    )
    return [*out, step]


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
        asked = control.of(*leaf).reshard_after_forward
        if not move.gathers_state or asked is False:
            out.append(move)
        elif not (asked is True and mixes):
            others.append(move)
    small = sum(math.prod(s.shape) * s.itemsize for s in others) <= LOOP_BYTES
    return [*out, *others] if small else out


def _without(plan: BodyPlan, moved: Mapping[int, Reshard]) -> BodyPlan:
    """The body taking constants, by their positions, as moved."""
    plan = without_moves(plan, {move.result: move.source for move in moved.values()})
    inputs = enumerate(plan.inputs)
    return replace(
        plan, inputs=tuple(moved[i].path[-1] if i in moved else s for i, s in inputs)
    )
