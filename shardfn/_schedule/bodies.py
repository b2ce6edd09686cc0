"""Takes a pass into the plans inside a plan.

In: a program, its plan, and a pass over one body. Out: the plan, the bodies of its
control flow rewritten by that pass.
"""

from collections.abc import Callable
from dataclasses import replace

from shardfn._core.plan import Apply, BodyPlan, Step
from shardfn._core.program import Program


def inside(
    program: Program, body: BodyPlan, rewrite: Callable[[Program, BodyPlan], BodyPlan]
) -> BodyPlan:
    """`body` with every plan in it rewritten; its own steps stay as they are.

    Args:
      program: the program.
      body: its plan.
      rewrite: makes a plan of a program's plan; it goes deeper itself.

    Returns:
      The plan.
    """
    steps: list[Step] = []
    for step in body.steps:
        if isinstance(step, Apply) and step.bodies:
            inner = zip(program.nodes[step.node].bodies, step.bodies, strict=True)
            step = replace(step, bodies=tuple(rewrite(p, b) for p, b in inner))
        steps.append(step)
    return replace(body, steps=tuple(steps))
