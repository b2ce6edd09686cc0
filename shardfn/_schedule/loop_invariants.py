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
from shardfn._core.plan import Apply, BodyPlan, Ref, Reshard, Step, reads
from shardfn._core.program import Program, mixes_passes
from shardfn._core.reasons import Note, noted
from shardfn._schedule.versions import without_moves

EQUAL = Note("loop_invariants", "left the loop: it is the same in every iteration")
CALLED = Note("loop_invariants", "left the function with a derivative of its own")
ASKED = Note("loop_invariants", "left the loop: reshard_after_forward=False")
REPEATED = Note("loop_invariants", "stays in the loop: reshard_after_forward=True")
SMALL = (
    "left the loop: what its iterations share takes {}, at most {} (limits.LOOP_BYTES)"
)
LARGE = (
    "stays in the loop: what its iterations share takes {}, more than {} "
    "(limits.LOOP_BYTES)"
)


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
    why: dict[Ref, Note] = {}
    if node.kind == "custom":
        why = {move.result: CALLED for _, move in found}
    else:
        moves = [move for _, move in found]
        why, staying = _leaving(node.bodies[body], moves, control)
        plan = _with_notes(plan, staying)
        found = [(i, move) for i, move in found if move.result in why]
    out: list[Step] = []
    moved: dict[int, Reshard] = {}
    operands, shardings = list(step.operands), list(step.operand_shardings)
    for i, move in found:
        at = region.operands[i]
        operand = operands[at]
        if operand is None:
            continue
        outside = Ref(operand.value, next(versions))
        notes = noted(move, why[move.result])
        out.append(
            replace(move, source=operand, result=outside, after=None, notes=notes)
        )
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
) -> tuple[dict[Ref, Note], dict[Ref, Note]]:
    """The moves of loop constants that leave the loop, by what they make, and those
    that stay, both with the reason.

    A gather that is to be repeated after the forward pass stays in a loop that holds
    both passes, one that is not leaves every loop; the others leave if they are small.
    """
    out: dict[Ref, Note] = {}
    staying: dict[Ref, Note] = {}
    others: list[Ref] = []
    mixes, total = mixes_passes(body), 0
    for move in moves:
        leaf = body.leaf(move.source.value)
        asked = control.of(*leaf).reshard_after_forward
        if not move.gathers_state:
            out[move.result] = EQUAL
        elif asked is False:
            out[move.result] = ASKED
        elif asked is True and mixes:
            staying[move.result] = REPEATED
        else:
            others.append(move.result)
            total += math.prod(move.shape) * move.itemsize
    sizes, is_small = (total, LOOP_BYTES), total <= LOOP_BYTES
    note = Note("loop_invariants", SMALL if is_small else LARGE, sizes)
    (out if is_small else staying).update(dict.fromkeys(others, note))
    return out, staying


def _with_notes(plan: BodyPlan, notes: Mapping[Ref, Note]) -> BodyPlan:
    """The body with notes at the moves that make some versions."""
    if not notes:
        return plan
    steps = (
        replace(s, notes=noted(s, notes[s.result]))
        if isinstance(s, Reshard) and s.result in notes
        else s
        for s in plan.steps
    )
    return replace(plan, steps=tuple(steps))


def _without(plan: BodyPlan, moved: Mapping[int, Reshard]) -> BodyPlan:
    """The body taking constants, by their positions, as moved."""
    plan = without_moves(plan, {move.result: move.source for move in moved.values()})
    inputs = enumerate(plan.inputs)
    return replace(
        plan, inputs=tuple(moved[i].path[-1] if i in moved else s for i, s in inputs)
    )
