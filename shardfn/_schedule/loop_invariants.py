"""Moves out of a loop what is the same in every iteration, and out of a call its moves.

In: a scan, while or custom step whose body moves constants. Out: the moves, in front of
the step, and the step. Weights that a body gathers in every iteration leave a loop only
if all but the largest are small together, as an iteration has that whole anyway: a
recurrent cell's do, and a head's in a loop over parts of the tokens; a whole model's in
a loop over microbatches do not, unless `reshard_after_forward` says so, or planning
found that a device has space for them (`choose_loops`). Out of a call
moves always go: the compiler inlines it, and would merge them with equal moves outside.
"""

import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import replace

from shardfn._core.control import Control
from shardfn._core.limits import LOOP_BYTES
from shardfn._core.plan import Apply, Reshard, Step
from shardfn._core.program import Program, mixes_passes
from shardfn._core.reasons import Note, noted
from shardfn._schedule.moved_inputs import moved_in_front, moves_of_inputs, with_moves

EQUAL = Note("loop_invariants", "left the loop: it is the same in every iteration")
CALLED = Note("loop_invariants", "left the function with a derivative of its own")
ASKED = Note("loop_invariants", "left the loop: reshard_after_forward=False")
REPEATED = Note("loop_invariants", "stays in the loop: reshard_after_forward=True")
SMALL = (
    "left the loop: of what its iterations share, {}, all but the largest takes {}, at "
    "most {} (limits.LOOP_BYTES)"
)
FITS = (
    "left the loop: of what its iterations share, {}, all but the largest takes {}, "
    "less than {}, which a device has space for (limits.LOOP_LIVE)"
)
LARGE = (
    "stays in the loop: of what its iterations share, {}, all but the largest takes "
    "{}, more than {} (limits.LOOP_BYTES)"
)
STACKS = (
    "stays in the loop in the loop: iterations of the outer one share {} (see "
    "limits.LOOP_LIVE)"
)
ALL_FIT = (
    "left both loops: iterations of the outer one share {}, less than {}, which a "
    "device has space for (limits.LOOP_LIVE)"
)


def hoist(
    program: Program, step: Apply, control: Control, versions: Iterator[int]
) -> list[Step]:
    """`step` with what moves out of its body in front, as versions of these numbers."""
    node = program.nodes[step.node]
    if not node.is_loop and node.kind != "custom":
        return [step]
    at = len(node.bodies) - 1  # of a while loop not the test
    body, plan, region = node.bodies[at], step.bodies[at], node.regions[at]
    given = [step.operands[i] is not None for i in region.operands]
    moves = {
        i: move
        for i, move in moves_of_inputs(body, plan, equal=True, stacked=True).items()
        if i in region.constants and given[i]
    }
    if node.kind == "custom":
        moves = {i: move for i, move in moves.items() if move in plan.steps}
        leaving = dict.fromkeys(moves, CALLED)
    else:
        here = moves_of_inputs(body, plan, equal=True)
        leaving, staying = _leaving(body, moves, moves.keys() - here.keys(), control)
        plan = with_moves(body, plan, staying)
    plan = with_moves(body, plan, dict.fromkeys(leaving))
    out, step = moved_in_front(
        step,
        {region.operands[i]: _with_note(moves[i], n) for i, n in leaving.items()},
        versions,
    )
    bodies = tuple(plan if i == at else b for i, b in enumerate(step.bodies))
    return [*out, replace(step, bodies=bodies)]


def _leaving(
    body: Program,
    moves: Mapping[int, Reshard],
    stacked: Set[int],
    control: Control,
) -> tuple[dict[int, Note], dict[int, Note]]:
    """The moves of loop constants that leave the loop, by their positions, and those
    that stay, both with the reason.

    A gather that is to be repeated after the forward pass stays in a loop that holds
    both passes, one that is not leaves every loop; the others leave if all but the
    largest are small together. Those that are `stacked`, of which each iteration of a
    loop inside has one slice at a time, leave if a device has space for all.
    """
    out: dict[int, Note] = {}
    staying: dict[int, Note] = {}
    others: dict[int, Reshard] = {}
    mixes = mixes_passes(body)
    for i, move in moves.items():
        asked = control.of(*body.leaf(body.inputs[i])).reshard_after_forward
        if not move.gathers_state:
            out[i] = EQUAL
        elif asked is False:
            out[i] = ASKED
        elif asked is True and mixes:
            staying[i] = REPEATED
        else:
            others[i] = move
    sizes = {i: math.prod(m.shape) * m.itemsize for i, m in others.items()}
    here = [i for i in others if i not in stacked]
    if here:
        shared = [sizes[i] for i in here]
        small, most = sum(shared) - max(shared), max(LOOP_BYTES, control.loop_bytes)
        text = LARGE if small > most else SMALL if most == LOOP_BYTES else FITS
        note = Note("loop_invariants", text, (sum(shared), small, most))
        (staying if text is LARGE else out).update(dict.fromkeys(here, note))
    if len(here) < len(others):
        size, most = sum(sizes.values()), control.loop_bytes
        text = STACKS if size > most else ALL_FIT
        note = Note("loop_invariants", text, (size, most))
        stacks = (i for i in others if i in stacked)
        (staying if text is STACKS else out).update(dict.fromkeys(stacks, note))
    return dict(sorted(out.items())), staying


def _with_note(move: Reshard, note: Note) -> Reshard:
    return replace(move, notes=noted(move, note))
