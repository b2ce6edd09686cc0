"""How long the iterations of loops over layers compute for what they send.

In: the plan of a loop. Out: whether they compute for about as long as they send, or for
longer. What is hidden of the first depends on the order of its moves more than that of
others: where more is computed, any order hides them but for those that an iteration
begins with, and where less is, none does.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from shardfn._core.limits import (
    BALANCED_BYTES,
    BALANCED_FLOPS,
    BALANCED_SHARE,
    CHAINED_BYTES,
    SUMS_FLOPS,
    SUMS_PART,
)
from shardfn._core.moves import AllGather, ReduceScatter
from shardfn._core.plan import Apply, Reshard, Site
from shardfn._core.program import Node
from shardfn._core.sharding import Axes
from shardfn._schedule.delayed_sums import StackedSum, stacked_sums
from shardfn._schedule.first_uses import moved_whole, uses_in
from shardfn._schedule.loop_events import events


@dataclass(frozen=True, slots=True)
class _Traffic:
    """What an iteration of a loop computes, and what it sends meanwhile.

    What it sends are its sums, or its gathers if the large ones of these are more, as
    where weights are frozen. A loop that stacks no sum, as in a forward pass, has a
    third of the FLOPs of a backward pass for them.

    Attributes:
      flops: of a device, three times those of a loop that stacks no sum.
      sent: bytes of each whole value, and of the part of it that one device has.
    """

    flops: Fraction
    sent: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        return sum(size for size, _ in self.sent)

    def is_mostly_of(self, whole: int, part: int) -> bool:
        """Whether half of it or more is of values and parts of so many bytes."""
        large = (n for n, each in self.sent if n >= whole and each >= part)
        return 2 * sum(large) >= self.size > 0


def is_balanced(node: Node, loop: Apply, axes: Axes, ahead: bool) -> bool:
    """Whether the iterations of a loop compute for about as long as they send.

    Most of what they send has to be of large weights. If nothing runs ahead, products
    of one operand may not need too much of what is gathered, as others would not hide
    that.

    Args:
      node: the loop.
      loop: its plan.
      axes: the mesh axes.
      ahead: whether an iteration gathers for the next one.

    Returns:
      Whether it is one, and the compiler would order its moves by wrong figures; that
      one transfer waits for another it never knows, unless it is given a profile.
    """
    if axes.profiled or not (axes.misjudges_network or ahead):
        return False
    traffic = _traffic(node, loop, axes)
    size = traffic.size
    if not BALANCED_FLOPS * size <= traffic.flops < SUMS_FLOPS * size:
        return False
    if not traffic.is_mostly_of(BALANCED_BYTES, SUMS_PART):
        return False
    every = uses_in(node.bodies[0], loop.bodies[0], {})
    sizes = [uses.size for each in every for uses in each.uses]
    return ahead or max(sizes, default=0) <= BALANCED_SHARE * sum(sizes)


def computes_for_longer(node: Node, loop: Apply, axes: Axes) -> bool:
    """Whether the iterations of a loop compute for longer than they send, between
    hosts."""
    if not axes.hides_network:
        return False
    traffic = _traffic(node, loop, axes)
    return traffic.flops >= SUMS_FLOPS * traffic.size


def hides_transfers(node: Node, loop: Apply, axes: Axes) -> bool:
    """The same, if half of what they send or more is of parts that are not all
    latency."""
    if not computes_for_longer(node, loop, axes):
        return False
    return _traffic(node, loop, axes).is_mostly_of(0, SUMS_PART)


def scattered_sums(node: Node, loop: Apply) -> dict[Site, StackedSum]:
    """The sums that a loop stacks which leave each device a part."""
    return {
        (each.within, each.step.result): each
        for each in stacked_sums(node, loop)
        if any(isinstance(move, ReduceScatter) for move in each.step.moves)
    }


def _traffic(node: Node, loop: Apply, axes: Axes) -> _Traffic:
    (program,) = node.bodies
    sums = scattered_sums(node, loop).values()
    summed = [(each.term_bytes(axes), each.part_bytes(axes)) for each in sums]
    every = list(events(program, loop.bodies[0], axes, ()))
    flops = sum((some for _, some, _ in every), Fraction())
    for ahead in loop.ahead:
        every += events(program, ahead.part, axes, ())
    moves = [s for _, _, s in every if s is not None and s.gathers_state]
    gathered = [(moved_whole(step), _part(step, axes)) for step in moves]
    sent = gathered if not sums or _large(gathered) > _large(summed) else summed
    return _Traffic(flops if sums else 3 * flops, tuple(sent))


def _large(sent: Sequence[tuple[int, int]]) -> int:
    """Bytes of what is worth a place of its own in the order of moves."""
    return sum(size for size, _ in sent if size >= CHAINED_BYTES)


def _part(step: Reshard, axes: Axes) -> int:
    """Bytes of what is gathered that come from each device."""
    over = (move.over for move in step.moves if isinstance(move, AllGather))
    devices = math.prod(axes.sizes[a] for each in over for a in each)
    return moved_whole(step) // devices
