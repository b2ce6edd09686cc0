"""What a plan sends.

In: a program and its plan. Out: bytes that each device sends, and in how many
collectives.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from shardfn._core.limits import LATENCY_BYTES
from shardfn._core.moves import Move
from shardfn._core.plan import BodyPlan, Reshard
from shardfn._core.program import Program
from shardfn._core.sharding import Axes

Made = tuple[Program, BodyPlan]
"""A program and its plan."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What each device sends per step.

    Attributes:
      bytes: how many.
      collectives: in how many collectives.
    """

    bytes: int = 0
    collectives: int = 0

    @property
    def price(self) -> int:
        """Bytes, and those that could be sent while collectives begin."""
        return self.bytes + self.collectives * LATENCY_BYTES


def sent(
    program: Program,
    body: BodyPlan,
    axes: Axes,
    times: int = 1,
    counts: Callable[[Program, Reshard], bool] = lambda program, step: True,
    unknown: int = 1,
) -> Sent:
    """What each device sends per step, of the moves that count; a loop whose iterations
    nobody knows is taken to make `unknown` of them."""
    total, collectives = 0.0, 0
    for step in body.steps:
        if isinstance(step, Reshard):
            if not counts(program, step):
                continue
            size, count = sent_by(step, axes)
            total += times * size
            collectives += times * count
            continue
        inner = times * (unknown if step.times is None else step.times or 1)
        bodies: Sequence[Made] = [
            *zip(program.nodes[step.node].bodies, step.bodies, strict=True)
        ]
        parts = [sent(*each, axes, inner, counts, unknown) for each in bodies]
        for ahead in step.ahead:
            runs = inner + times * ahead.lead
            body_of = program.nodes[step.node].bodies[0]
            parts.append(sent(body_of, ahead.part, axes, runs, counts, unknown))
        total += sum(part.bytes for part in parts)
        collectives += sum(part.collectives for part in parts)
    return Sent(round(total), collectives)


def sent_by(step: Reshard, axes: Axes) -> tuple[float, int]:
    """The bytes that each device sends for one step of a plan, and its collectives."""
    moves = [move for _, move in communicating_moves(step, axes)]
    size = sum(move.wire_bytes(step.part_shape, axes, step.itemsize) for move in moves)
    collectives = 0
    if step.together in (None, step.result):
        collectives = sum(
            message.times
            for move in moves
            for message in move.messages(step.part_shape, axes)
        )
    return size, collectives


def communicating_moves(step: Reshard, axes: Axes) -> Iterator[tuple[int, Move]]:
    """The moves of `step` that use the wire, and which of its path each is."""
    for index, move in enumerate(step.moves):
        if move.communicates and any(axes.sizes[axis] > 1 for axis in move.over):
            yield index, move
