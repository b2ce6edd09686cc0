"""What an iteration of a loop does, in order: its matrix products and its moves.

In: the plan of a body. Out: FLOPs and moves, one after the other, those of calls in it
among them.
"""

import math
from collections.abc import Iterator
from fractions import Fraction

from shardfn._core.equation_flops import flops_of
from shardfn._core.plan import Apply, BodyPlan, Reshard
from shardfn._core.program import Node, Program
from shardfn._core.sharding import Axes


def events(
    program: Program, body: BodyPlan, axes: Axes, within: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], Fraction, Reshard | None]]:
    """In order, what is computed in a body and the calls in it, and its moves."""
    for step in body.steps:
        if isinstance(step, Reshard):
            yield within, Fraction(), step
        elif isinstance(step, Apply):
            node = program.nodes[step.node]
            if node.is_call:
                (inner,), (plan,) = node.bodies, step.bodies
                yield from events(inner, plan, axes, (*within, step.node))
            else:
                yield within, product_flops(node, step, axes), None


def product_flops(node: Node, step: Apply, axes: Axes) -> Fraction:
    """FLOPs that a device computes of a node; of branches, the one with the most."""
    if node.kind == "op":
        parts = math.prod(axes.sizes[axis] for _, axis in step.parts)
        return Fraction(sum(flops_of(node.eqn).values()), parts)
    each = [
        sum((flops for _, flops, _ in events(p, b, axes, ())), Fraction())
        for p, b in zip(node.bodies, step.bodies, strict=True)
    ]
    return max(each, default=Fraction()) * (step.times or 1)
