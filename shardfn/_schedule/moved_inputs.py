"""The moves of a body's inputs that whoever runs the body could make in its place.

In: a program and its plan. Out: these moves, by input, also of what a remat in the body
is given; and the plan with others in their place.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from shardfn._core.plan import Apply, BodyPlan, Ref, Reshard, Step, reads
from shardfn._core.program import Program
from shardfn._core.reasons import Note, noted
from shardfn._core.sharding import AxisSharding, Split
from shardfn._schedule.versions import without_moves


def moves_of_inputs(
    program: Program, plan: BodyPlan, equal: bool = False, stacked: bool = False
) -> dict[int, Reshard]:
    """The move of each input that nothing but this move reads.

    Args:
      program: the program of a body.
      plan: its plan.
      equal: whether several equal moves of an input count, too: the first of them.
      stacked: whether moves in scans count, too: of what all iterations share, and of
        each slice of a stack, which are together a move of the stack.

    Returns:
      The moves, by the positions of the inputs. A move that is in a remat names values
      of its program.
    """
    positions = {Ref(value): i for i, value in enumerate(program.inputs)}
    readers = Counter(ref for step in plan.steps for ref in _reads(step))
    readers.update(ref for ref in (*plan.outputs, *plan.exports) if ref is not None)
    found: dict[Ref, list[Reshard]] = {ref: [] for ref in positions}
    for ref, move in _found(program, plan, equal, stacked):
        if ref in found:
            found[ref].append(move)
    return {
        positions[ref]: moves[0]
        for ref, moves in found.items()
        if readers[ref] == len(moves) > 0
        and (equal or len(moves) == 1)
        and len(set(map(_goal, moves))) == 1
    }


def _goal(move: Reshard) -> tuple[Any, ...]:
    """The same for moves of one value that make the same of it."""
    return move.path[-1], move.dtype, move.written


def _found(
    program: Program, plan: BodyPlan, equal: bool, stacked: bool
) -> Iterator[tuple[Ref, Reshard]]:
    """What is moved, and how."""
    for step in plan.steps:
        if isinstance(step, Reshard):
            yield step.source, step
            continue
        node = program.nodes[step.node]
        if node.kind != "remat" and not (stacked and node.kind == "scan"):
            continue
        (inner,), (region,) = node.bodies, node.regions
        moves = moves_of_inputs(inner, step.bodies[0], equal, stacked)
        for k, move in moves.items():
            ref = step.operands[region.operands[k]]
            if k in region.slices:
                move = _of_stack(move, step.times or 0)
            elif k not in region.constants:
                continue
            if ref is not None and move is not None:
                yield ref, move


def _of_stack(move: Reshard, length: int) -> Reshard | None:
    """The move of a stack that is this move of each slice; None if that is none."""
    splits = [s for sharding in move.path for s in sharding if isinstance(s, Split)]
    plain = all(s.dim >= 0 and not (s.group or s.runs or s.shift) for s in splits)
    if not plain or any(move.written) or move.auto or move.in_bits:
        return None

    def outside(state: AxisSharding) -> AxisSharding:
        return replace(state, dim=state.dim + 1) if isinstance(state, Split) else state

    return replace(
        move,
        path=tuple(tuple(map(outside, sharding)) for sharding in move.path),
        shape=(length, *move.shape),
    )


def _reads(step: Step) -> Iterator[Ref]:
    """What a step reads, as often as it does: a remat that is given a value twice
    might need it in two ways."""
    if isinstance(step, Apply):
        operands = [ref for ref in step.operands if ref is not None]
        yield from operands
        yield from set(reads(step)).difference(operands)
    else:
        yield from set(reads(step))


def with_moves(
    program: Program, plan: BodyPlan, instead: Mapping[int, Note | None]
) -> BodyPlan:
    """The plan of a body with other moves of some inputs.

    Args:
      program: the program of the body.
      plan: its plan.
      instead: for inputs that `moves_of_inputs` has, by position, what the moves are
        given to note; None if there are none any more, as the input comes moved.

    Returns:
      The plan.
    """
    if not instead:
        return plan
    moves = moves_of_inputs(program, plan, equal=True, stacked=True)
    positions = {Ref(program.inputs[i]): i for i in instead}
    steps: list[Step] = []
    gone: dict[Ref, Ref] = {}
    for step in plan.steps:
        if isinstance(step, Apply):
            steps.append(_called(program, step, positions, instead, moves))
            continue
        i = positions.get(step.source)
        note = None if i is None else instead[i]
        if note is not None:
            steps.append(replace(step, notes=noted(step, note)))
            continue
        if i is not None:
            gone[step.result] = step.source
        steps.append(step)
    plan = without_moves(replace(plan, steps=tuple(steps)), gone)
    inputs = list(plan.inputs)
    for i, new in instead.items():
        inputs[i] = inputs[i] if new else moves[i].path[-1]
    return replace(plan, inputs=tuple(inputs))


def _called(
    program: Program,
    step: Apply,
    positions: Mapping[Ref, int],
    instead: Mapping[int, Note | None],
    moves: Mapping[int, Reshard],
) -> Apply:
    """A remat or scan with other moves of some operands; other steps as they are."""
    node = program.nodes[step.node]
    refs = enumerate(step.operands)
    given = {
        k: positions[ref] for k, ref in refs if ref is not None and ref in positions
    }
    if node.kind not in ("remat", "scan") or not given:
        return step
    shardings = list(step.operand_shardings)
    for k, i in given.items():
        shardings[k] = shardings[k] if instead[i] else moves[i].path[-1]
    (region,) = node.regions
    inner = {region.operands.index(k): instead[i] for k, i in given.items()}
    body = with_moves(node.bodies[0], step.bodies[0], inner)
    return replace(step, operand_shardings=tuple(shardings), bodies=(body,))


def moved_in_front(
    step: Apply, moves: Mapping[int, Reshard], versions: Iterator[int]
) -> tuple[list[Reshard], Apply]:
    """Moves operands of a step in front of it; its bodies stay as they are.

    Args:
      step: the step.
      moves: by the positions of the operands, how a body of it moves them.
      versions: numbers for the versions that are made.

    Returns:
      The moves, and the step that is given what they make.
    """
    operands, shardings = list(step.operands), list(step.operand_shardings)
    made: list[Reshard] = []
    for at, move in moves.items():
        if (source := operands[at]) is None:
            continue
        result = Ref(source.value, next(versions))
        made.append(replace(move, source=source, result=result, after=None))
        operands[at], shardings[at] = result, move.path[-1]
    step = replace(step, operands=tuple(operands), operand_shardings=tuple(shardings))
    return made, step
