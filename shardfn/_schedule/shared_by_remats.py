"""Takes out of remats the gathers that several of them make one after another.

In: a plan with remats. Out: the plan, in which a weight that one remat gathers soon
after another, such as a head for each of several chunks of the tokens, is gathered in
front of each. There equal gathers share (`share_gathers`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from shardfn._core.plan import Apply, BodyPlan, Ref, Reshard, Step
from shardfn._core.program import Program
from shardfn._schedule.moved_inputs import (
    moved_in_front,
    moves_of_inputs,
    with_moves,
)
from shardfn._schedule.share_gathers import gathered_bytes


@dataclass(frozen=True, slots=True)
class _Use:
    """A gather of a value, here or in a remat.

    Attributes:
      step: the index of the step that it is, or that it is in.
      operand: which operand of a remat is gathered; -1 if it is here.
      move: the gather.
      source: what is gathered, as it is named here.
      before: bytes that have been gathered when the step begins.
      after: those when it ends, but for the gather's own.
    """

    step: int
    operand: int
    move: Reshard
    source: Ref
    before: int
    after: int

    @property
    def key(self) -> tuple[Any, ...]:
        return self.source, self.move.path[-1], self.move.dtype, self.move.written


def take_out_of_remats(
    program: Program, body: BodyPlan, versions: Iterator[int]
) -> BodyPlan:
    """Takes out what remats gather of a value that was gathered just before.

    Args:
      program: the body's program.
      body: its plan.
      versions: numbers for the new versions.

    Returns:
      The plan.
    """
    last: dict[tuple[Any, ...], _Use] = {}
    taken: dict[int, dict[int, Reshard]] = {}
    for use in _uses(program, body):
        known = last.get(use.key)
        own = math.prod(use.move.shape) * use.move.itemsize
        if known is not None and use.before - known.after <= own:
            for each in (known, use):
                if each.operand >= 0:
                    taken.setdefault(each.step, {})[each.operand] = each.move
        last[use.key] = use
    if not taken:
        return body
    steps: list[Step] = []
    for i, step in enumerate(body.steps):
        if i in taken and isinstance(step, Apply):
            (inner,) = program.nodes[step.node].bodies
            rest = with_moves(inner, step.bodies[0], dict.fromkeys(taken[i]))
            moves, step = moved_in_front(step, taken[i], versions)
            step = replace(step, bodies=(rest,))
            steps += moves
        steps.append(step)
    return replace(body, steps=tuple(steps))


def _uses(program: Program, body: BodyPlan) -> Iterator[_Use]:
    gathered = 0
    for i, step in enumerate(body.steps):
        before = gathered
        if isinstance(step, Reshard):
            if step.gathers_state:
                gathered += math.prod(step.shape) * step.itemsize
                yield _Use(i, -1, step, step.source, before, before)
            continue
        gathered += sum(map(gathered_bytes, step.bodies)) * (step.times or 1)
        node = program.nodes[step.node]
        if node.kind != "remat":
            continue
        for k, move in moves_of_inputs(node.bodies[0], step.bodies[0]).items():
            source = step.operands[k]
            if source is not None and move.gathers_state:
                own = math.prod(move.shape) * move.itemsize
                yield _Use(i, k, move, source, before, gathered - own)
