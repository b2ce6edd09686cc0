"""What is checked of a program before it runs for the first time.

In: the lowered step and its plan, both made when they are needed. Out: nothing; or an
error or a warning where the compiler made something else than was planned, or another
process planned another step.
"""

from collections.abc import Callable, Sequence

import jax
from jax.sharding import Mesh

from shardfn._api.planner import describe
from shardfn._core import processes
from shardfn._core.errors import (
    ShardingError,
    VerificationWarning,
    called,
    step_name,
    warn,
)
from shardfn._lowering.planned_program import Planned
from shardfn.analysis._program_hash import listing_of


def check_first_run(
    lowered: Callable[[], jax.stages.Lowered],
    planned: Callable[[], Planned],
    mesh: Mesh,
    verify: str,
    is_traced: bool,
) -> None:
    """Checks a step that no call has run yet.

    Args:
      lowered: lowers it for the arguments of the call.
      planned: plans it for them.
      mesh: the mesh that it runs on.
      verify: what to do if the compiled step is not as planned.
      is_traced: whether the call is part of another program, which is compiled instead.

    Raises:
      ShardingError: the processes differ, or the compiled step is not as planned.
    """
    group = processes.of(mesh.devices.flat)
    if len(group) > 1:
        with processes.meeting("planned the step", group):
            made = planned()
        _check_processes(made, group)
        if not is_traced:
            with processes.meeting("compiled the step", group):
                lowered().compile()
    if verify != "off" and not is_traced:
        _check_compiled(lowered(), planned(), mesh, verify)


def _check_processes(planned: Planned, group: Sequence[int]) -> None:
    """Raises if another process of a group is about to run another plan, first of all
    because its arguments have other types, such as more rows of its own."""
    avals, names = planned.input_avals, [leaf.name for leaf in planned.state]
    names += [f"leaf {i} of the batch" for i in range(len(avals) - len(names))]
    each = (f"{n}: {x.str_short()}" for n, x in zip(names, avals, strict=True))
    processes.assert_processes_agree("arguments", "\n".join(each), group)
    plan = describe(planned)
    lines = str(plan), f"program {plan.program}", *listing_of(planned.program)
    processes.assert_processes_agree("plans", "\n".join(lines), group)


def _check_compiled(
    lowered: jax.stages.Lowered, planned: Planned, mesh: Mesh, verify: str
) -> None:
    """Warns or raises if the compiled step is not as planned. The call that follows
    finds the step compiled."""
    checked = describe(planned, fingerprint=False).verify(lowered.compile())
    if checked.ok:
        return
    message = (
        f"the compiled {step_name()} is not as planned on "
        f"{mesh.devices.flat[0].device_kind}.\n{called()}"
        f"{checked.problems()}\n"
    )
    if verify == "error":
        raise ShardingError(f"{message}verify='warn' warns, and runs it as it is.")
    warn(f"{message}It runs as it is.", VerificationWarning)
