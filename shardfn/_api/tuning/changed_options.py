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
from shardfn._core.leaf_options import LEAF_OPTIONS


def with_options(
    step: ShardedStep[..., Any], options: Mapping[str, Any]
) -> ShardedStep[..., Any]:
    """The same step with other options: those of leaves, of latencies, and of the
    compiler, of which those that it has and these do not name stay.

    Args:
      step: the step.
      options: names and values as `fully_shard` takes them.

    Returns:
      A new step; `step` if there are no options.
    """
    if not options:
        return step
    of_leaves = {n: v for n, v in options.items() if n in LEAF_OPTIONS}
    programs, storage = step.programs, step.storage
    control = make_control(**{**storage.control.given, **of_leaves})
    control.check_axes(storage.axes.names)
    plain = replace(step.plain, control=control).of(step.plain.step)
    storage = replace(storage, control=control).on(step.mesh)
    asked = programs.asked
    if options.get("compiler_options") and asked is not False:
        asked = {**(asked or {}), **options["compiler_options"]}
    latencies = options.get("latencies", programs.latencies)
    changed = Programs(plain, storage, programs.donate, asked, latencies)
    return ShardedStep(changed, step.verify)
