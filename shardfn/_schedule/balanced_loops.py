"""Loops over layers that compute for about as long as they send.

In: the plan of a loop. Out: whether it is one, and in which order an iteration uses the
weights that it gathers. What is hidden of such a loop depends on the order of its moves
more than that of others: where more is computed, any order hides them, and where less
is, none does.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction

from shardfn._core.equation_flops import flops_of
from shardfn._core.limits import (
    BALANCED_BYTES,
    BALANCED_FLOPS,
    BALANCED_SHARE,
    CHAINED_BYTES,
    SUMS_FLOPS,
    SUMS_PART,
)
from shardfn._core.moves import AllGather, ReduceScatter
from shardfn._core.plan import Apply, BodyPlan, Ref, Reshard, reads
from shardfn._core.program import Node, Program
from shardfn._core.sharding import Axes
from shardfn._schedule.bodies import Site
from shardfn._schedule.delayed_sums import StackedSum, stacked_sums
from shardfn._schedule.loop_events import events


def is_balanced(node: Node, loop: Apply, axes: Axes) -> bool:
    """Whether the iterations of a loop compute for about as long as they send.

    What they send are their sums, or in a loop that stacks none, as in a forward pass,
    their gathers, for a third of the FLOPs of a backward pass. Most of it has to be of
    large weights. Products of one operand may not need too much of what is gathered, as
    others would not hide that.

    Args:
      node: the loop.
      loop: its plan.
      axes: the mesh axes.

    Returns:
      Whether it is one, and the compiler would order its moves by wrong figures.
    """
    if not axes.misjudges_network:
        return False
    (program,), (body,) = node.bodies, loop.bodies
    sums = scattered_sums(node, loop).values()
    sent = [(each.term_bytes(axes), each.part_bytes(axes)) for each in sums]
    flops, gathers = Fraction(), list[Reshard]()
    for _, some, step in events(program, body, axes, ()):
        flops += some
        if step is not None and step.gathers_state:
            gathers.append(step)
    if not sent:
        flops *= 3
        sent = [(_bytes(step), _part(step, axes)) for step in gathers]
    size = sum(size for size, _ in sent)
    if not BALANCED_FLOPS * size <= flops < SUMS_FLOPS * size:
        return False
    large = (n for n, part in sent if n >= BALANCED_BYTES and part >= SUMS_PART)
    sizes = [uses.size for uses in _all_first_uses(program, body)]
    is_shared = max(sizes, default=0) <= BALANCED_SHARE * sum(sizes)
    return 2 * sum(large) >= size and is_shared


def scattered_sums(node: Node, loop: Apply) -> dict[Site, StackedSum]:
    """The sums that a loop stacks which leave each device a part."""
    return {
        (each.within, each.step.result): each
        for each in stacked_sums(node, loop)
        if any(isinstance(move, ReduceScatter) for move in each.step.moves)
    }


def _bytes(step: Reshard) -> int:
    return math.prod(step.shape) * step.itemsize


def _part(step: Reshard, axes: Axes) -> int:
    """Bytes of what is gathered that come from each device."""
    over = (move.over for move in step.moves if isinstance(move, AllGather))
    return _bytes(step) // math.prod(axes.sizes[a] for each in over for a in each)


def _all_first_uses(program: Program, body: BodyPlan) -> Iterator["FirstUses"]:
    """Those of a body and of the calls in it."""
    yield from first_uses(program, body)
    for step in body.steps:
        if isinstance(step, Apply) and (node := program.nodes[step.node]).is_call:
            yield from _all_first_uses(node.bodies[0], step.bodies[0])


@dataclass(slots=True)
class FirstUses:
    """Products with gathered weights that multiply the same, in their order.

    Attributes:
      others: what they multiply besides the weights.
      gathers: of each, the gathers that it is the first to use.
      results: what each makes.
      size: bytes of all these weights.
    """

    others: frozenset[Ref]
    gathers: list[frozenset[Ref]] = field(default_factory=list)
    results: list[Ref] = field(default_factory=list)
    size: int = 0


def first_uses(program: Program, body: BodyPlan) -> list[FirstUses]:
    """The first uses of a body's large gathers."""
    found: list[FirstUses] = []
    made_of: dict[Ref, frozenset[Ref]] = {}
    sizes: dict[Ref, int] = {}
    used = frozenset[Ref]()
    for step in body.steps:
        read = reads(step)
        origins = frozenset[Ref]().union(*(made_of.get(r, frozenset()) for r in read))
        if isinstance(step, Reshard):
            if _stands_alone(step):
                origins |= {step.result}
                sizes[step.result] = _bytes(step)
            made_of[step.result] = origins
            continue
        node = program.nodes[step.node]
        if node.kind == "op" and flops_of(node.eqn):
            if new := origins - used:
                others = frozenset(r for r in read if not made_of.get(r, used) & new)
                if not found or found[-1].others != others:
                    found.append(FirstUses(others))
                found[-1].gathers.append(new)
                found[-1].results.append(Ref(node.outputs[0]))
                found[-1].size += sum(sizes[r] for r in new)
                used |= new
            origins = frozenset()
        made_of.update(dict.fromkeys([*map(Ref, node.outputs), *step.exports], origins))
    return found


def _stands_alone(step: Reshard) -> bool:
    alone = step.after is None and step.together is None
    return step.gathers_state and alone and _bytes(step) >= CHAINED_BYTES
