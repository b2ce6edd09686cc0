"""Schedule passes: each rewrites a plan into a plan that moves the same values better.

In: a program and its plan. Out: the plan, its results unchanged to the last bit.
"""

from dataclasses import replace

from shardfn._plan import Apply, BodyPlan, Step
from shardfn._program import Program
from shardfn._schedule._hoist import hoist
from shardfn._schedule._share import share
from shardfn._sharding import Axes


def schedule(program: Program, body: BodyPlan, axes: Axes) -> BodyPlan:
    """Runs every pass on a plan and the plans in it, innermost first.

    Args:
      program: the step.
      body: its plan, as `propagate` made it.
      axes: the mesh axes.

    Returns:
      The scheduled plan.
    """
    return _schedule(program, body, axes, unit=False, in_loop=False)


def _schedule(
    program: Program, body: BodyPlan, axes: Axes, unit: bool, in_loop: bool
) -> BodyPlan:
    steps: list[Step] = []
    for step in body.steps:
        if isinstance(step, Apply) and step.bodies:
            node = program.nodes[step.node]
            loops = node.kind in ("scan", "while")
            inner = tuple(
                _schedule(
                    inner_program,
                    inner_body,
                    axes,
                    unit=node.kind != "cond" and not mixes_passes(inner_program),
                    in_loop=in_loop or loops,
                )
                for inner_program, inner_body in zip(
                    node.bodies, step.bodies, strict=True
                )
            )
            steps.extend(hoist(program, replace(step, bodies=inner), axes))
        else:
            steps.append(step)
    return share(program, replace(body, steps=tuple(steps)), axes, unit, in_loop)


def mixes_passes(program: Program) -> bool:
    """Whether a body holds both a forward and a backward pass, as a microbatch does."""
    kinds = {node.backward for node in program.nodes}
    nested = any(mixes_passes(b) for node in program.nodes for b in node.bodies)
    return len(kinds) > 1 or nested
