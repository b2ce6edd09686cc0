"""A sharded step with other options.

In: a step, and options as users write them. Out: the same step with these in place of
its own.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardfn._api.compiled_steps import Programs
from shardfn._api.sharded_step import ShardedStep
from shardfn._core.control import make_control


def with_options(
    step: ShardedStep[..., Any], options: Mapping[str, Any]
) -> ShardedStep[..., Any]:
    """The same step with other options: those of leaves, and of the compiler, of which
    those that it has and these do not name stay.

    Args:
      step: the step.
      options: names and values as `fully_shard` takes them.

    Returns:
      A new step; `step` if there are no options.
    """
    if not options:
        return step
    of_leaves = {n: v for n, v in options.items() if n != "compiler_options"}
    programs, storage = step.programs, step.storage
    control = make_control(**{**storage.control.given, **of_leaves})
    control.check_axes(storage.axes.names)
    plain = replace(step.plain, control=control).of(step.plain.step)
    storage = replace(storage, control=control).on(step.mesh)
    asked = programs.asked
    if options.get("compiler_options") and asked is not False:
        asked = {**(asked or {}), **options["compiler_options"]}
    return ShardedStep(Programs(plain, storage, programs.donate, asked), step.verify)
