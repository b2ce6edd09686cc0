"""Signs that an update takes of gradients whose terms are quantized.

In: a program and its plan. Out: for each leaf of such a gradient, the operation; an
element that is rounded to zero, or to the other side of it, has another sign.
"""

from collections.abc import Iterator

from shardfn._core.leaves import Names
from shardfn._core.moves import ExchangeTerms
from shardfn._core.phases import UPDATE
from shardfn._core.plan import Apply, BodyPlan
from shardfn._core.program import Node, Program


def inexact_signs(program: Program, body: BodyPlan) -> list[tuple[Names, Node]]:
    """The leaves and operations, in the program's order.

    Args:
      program: the step, its values named after leaves of the state.
      body: its scheduled plan.

    Returns:
      A pair for each operation that takes such a sign.
    """
    rounded = set(_rounded(program, body))
    return [
        (tuple(name for name in names if name in rounded), node)
        for names, node in (_signs(program) if rounded else ())
        if not rounded.isdisjoint(names)
    ]


def _rounded(program: Program, body: BodyPlan) -> Iterator[str]:
    """The leaves whose gradients are sums of quantized terms."""
    for step in body.steps:
        if isinstance(step, Apply):
            bodies = zip(program.nodes[step.node].bodies, step.bodies, strict=True)
            for each in bodies:
                yield from _rounded(*each)
        elif any(isinstance(move, ExchangeTerms) for move in step.moves):
            yield from program.leaf(step.source.value)


def _signs(program: Program) -> Iterator[tuple[Names, Node]]:
    """What an update takes signs of, by leaves."""
    for node in program.nodes:
        if node.eqn.primitive.name == "sign" and node.during.phase == UPDATE:
            yield program.leaf(node.outputs[0]), node
        for body in node.bodies:
            yield from _signs(body)
