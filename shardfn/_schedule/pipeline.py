"""Schedule passes: each rewrites a plan into a plan that moves the same values better.

In: a program and its plan. Out: the plan, its results unchanged to the last bit unless
the user asks for other dtypes on the wire.
"""

import itertools
from dataclasses import replace

from shardfn._core.control import Control
from shardfn._core.plan import Apply, BodyPlan, Reshard, Step
from shardfn._core.program import Program, mixes_passes
from shardfn._core.sharding import Axes
from shardfn._schedule.backward_liveness import hold
from shardfn._schedule.bucket import bucket
from shardfn._schedule.chain_reduce_scatters import pace
from shardfn._schedule.keep_gathered import keep
from shardfn._schedule.limit_all_gathers import order
from shardfn._schedule.loop_invariants import hoist
from shardfn._schedule.prefetch import prefetch
from shardfn._schedule.share_gathers import share
from shardfn._schedule.wire_dtypes import choose_dtypes


def schedule(
    program: Program, body: BodyPlan, control: Control, axes: Axes
) -> BodyPlan:
    """Runs every pass on a plan and the plans in it, innermost first.

    Args:
      program: the step.
      body: its plan, as `propagate` made it.
      control: what is asked of the moves of state leaves.
      axes: the mesh axes.

    Returns:
      The scheduled plan.
    """
    body = _schedule(program, body, control, axes, unit=False)
    body = prefetch(program, body, control)
    body = (
        bucket(program, body, control) if any(control.asked("bucket_bytes")) else body
    )
    body = order(program, pace(program, body), control)
    return hold(program, body, axes)


def _schedule(
    program: Program, body: BodyPlan, control: Control, axes: Axes, unit: bool
) -> BodyPlan:
    steps: list[Step] = []
    made = (s.result.version for s in body.steps if isinstance(s, Reshard))
    versions = itertools.count(1 + max(made, default=0))
    for step in choose_dtypes(program, body, control, axes).steps:
        if isinstance(step, Apply) and step.bodies:
            node = program.nodes[step.node]
            inner = tuple(
                _schedule(
                    inner_program,
                    inner_body,
                    control,
                    axes,
                    unit=node.kind != "cond" and not mixes_passes(inner_program),
                )
                for inner_program, inner_body in zip(
                    node.bodies, step.bodies, strict=True
                )
            )
            step = replace(step, bodies=inner)
            steps.extend(hoist(program, step, control, versions))
        else:
            steps.append(step)
    body = replace(body, steps=tuple(steps))
    if mixes_passes(program):
        body = keep(program, body, control)
    return share(program, body, control, unit)
