"""Schedule passes: each rewrites a plan into a plan that moves the same values better.

In: a program and its plan. Out: the plan, its results unchanged to the last bit unless
the user asks for other dtypes on the wire. `PASSES` are the passes in their order.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

from shardfn._core.control import Control
from shardfn._core.plan import Apply, BodyPlan, Reshard, Step
from shardfn._core.program import Program, mixes_passes
from shardfn._core.sharding import Axes
from shardfn._core.stages import Observer, unobserved
from shardfn._schedule.bodies import inside
from shardfn._schedule.bucket import bucket
from shardfn._schedule.duplicate_producers import duplicate_producers
from shardfn._schedule.feed_back import feed_back
from shardfn._schedule.free_operands import free_operands
from shardfn._schedule.host_transfers import host_transfers
from shardfn._schedule.keep_gathered import keep_gathered
from shardfn._schedule.keep_quantized import keep_quantized
from shardfn._schedule.limit_all_gathers import limit_all_gathers
from shardfn._schedule.loop_invariants import hoist
from shardfn._schedule.narrow_stacks import narrow_stacks
from shardfn._schedule.order_gathers import order_gathers
from shardfn._schedule.order_search import search_order
from shardfn._schedule.pad_sums import pad_sums
from shardfn._schedule.prefetch import prefetch
from shardfn._schedule.quantize_moves import quantize
from shardfn._schedule.share_gathers import share_gathers
from shardfn._schedule.shared_by_remats import take_out_of_remats
from shardfn._schedule.undelayed_sums import undelay_sums
from shardfn._schedule.wire_dtypes import choose_dtypes


@dataclass(frozen=True, slots=True)
class SchedulePass:
    """A pass over the plan of a whole program.

    Attributes:
      name: of the module that has it.
      run: the plan of a program, rewritten as asked.
    """

    name: str
    run: Callable[[Program, BodyPlan, Control, Axes], BodyPlan]


def schedule(
    program: Program,
    body: BodyPlan,
    control: Control,
    axes: Axes,
    observe: Observer = unobserved,
) -> BodyPlan:
    """Runs every pass on a plan and the plans in it.

    Args:
      program: the step.
      body: its plan, as `propagate` made it.
      control: what is asked of the moves of state leaves.
      axes: the mesh axes.
      observe: is given the plan after each pass.

    Returns:
      The scheduled plan.
    """
    for step in PASSES:
        body = step.run(program, body, control, axes)
        observe(step.name, program, body)
    return body


def _dtypes(program: Program, body: BodyPlan, control: Control, axes: Axes) -> BodyPlan:
    body = inside(program, body, lambda p, b: _dtypes(p, b, control, axes))
    return choose_dtypes(program, body, control, axes)


def _gathers(
    program: Program, body: BodyPlan, control: Control, unit: bool = False
) -> BodyPlan:
    """Moves gathers out of loops, keeps them between the passes and shares them, the
    innermost body first: what leaves one is shared with what is outside."""
    steps: list[Step] = []
    made = (s.result.version for s in body.steps if isinstance(s, Reshard))
    versions = itertools.count(1 + max(made, default=0))
    for step in body.steps:
        if isinstance(step, Apply) and step.bodies:
            node = program.nodes[step.node]
            in_branch = node.kind == "cond"
            inner = tuple(
                _gathers(p, b, control, unit=not in_branch and not mixes_passes(p))
                for p, b in zip(node.bodies, step.bodies, strict=True)
            )
            step = replace(step, bodies=inner)
            steps.extend(hoist(program, step, control, versions))
        else:
            steps.append(step)
    body = replace(body, steps=tuple(steps))
    body = take_out_of_remats(program, body, versions)
    if mixes_passes(program):
        body = keep_gathered(program, body, control)
    return share_gathers(program, body, control, unit)


PASSES = (
    SchedulePass("wire_dtypes", _dtypes),
    SchedulePass("quantize_moves", quantize),
    SchedulePass("feed_back", feed_back),
    SchedulePass("share_gathers", lambda p, b, control, axes: _gathers(p, b, control)),
    SchedulePass("prefetch", prefetch),
    SchedulePass("bucket", lambda p, b, control, axes: bucket(p, b, control)),
    SchedulePass(
        "keep_quantized",
        lambda p, b, control, axes: keep_quantized(p, b, control, axes),
    ),
    SchedulePass(
        "narrow_stacks", lambda p, b, control, axes: narrow_stacks(p, b, axes)
    ),
    SchedulePass(
        "undelayed_sums", lambda p, b, control, axes: undelay_sums(p, b, axes)
    ),
    SchedulePass(
        "order_gathers", lambda p, b, control, axes: order_gathers(p, b, axes)
    ),
    SchedulePass("order_search", lambda p, b, control, axes: search_order(p, b, axes)),
    SchedulePass(
        "limit_all_gathers",
        lambda p, b, control, axes: limit_all_gathers(p, b, control),
    ),
    SchedulePass(
        "free_operands", lambda p, b, control, axes: free_operands(p, b, axes)
    ),
    SchedulePass(
        "host_transfers", lambda p, b, control, axes: host_transfers(p, b, axes)
    ),
    SchedulePass(
        "duplicate_producers",
        lambda p, b, control, axes: duplicate_producers(p, b, axes),
    ),
    SchedulePass("pad_sums", lambda p, b, control, axes: pad_sums(p, b, axes)),
)
"""What `schedule` runs, in this order. `share_gathers` also moves constants out of
loops and keeps what the forward pass gathered."""
