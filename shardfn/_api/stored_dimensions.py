"""On which dimensions the state of a planned step is best stored.

In: a planned step. Out: the dimensions with which it sends least, a line of advice for
its plan, and the option that stores leaves so.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardfn._api.planner import facts_of, required_of
from shardfn._core.errors import listed
from shardfn._core.leaves import leaf_name
from shardfn._core.limits import STATIONARY_BYTES, STATIONARY_SHARE
from shardfn._core.option_values import StoredAxis
from shardfn._core.shown_limits import SHOWN_LEAVES
from shardfn._lowering.choose_dimensions import StoredByUse, choose_dimensions
from shardfn._lowering.plan_jaxpr import Planner
from shardfn._lowering.planned_program import Planned


def dimensions_of(planned: Planned) -> tuple[dict[str, dict[str, int]], StoredByUse]:
    """The dimensions on which leaves are best stored, by their use in a planned step.

    Args:
      planned: the step, its state stored as it is now.

    Returns:
      By name, the mesh axis and the dimension of each leaf that is best moved; and what
      is sent then.
    """
    axes, traced, stored = planned.axes, planned.traced, planned.stored
    batch = planned.body.inputs[len(stored) :]
    planner = Planner(
        planned.base,
        (*stored, *batch),
        required_of(traced, stored, (*stored, *batch)),
        axes,
        planned.min_size,
        planned.control.on(axes),
        facts_of(traced, planned.state, (), lambda program: program),
    )
    names = [leaf_name(leaf.path) for leaf in planned.state]
    fixed = frozenset(n for n in names if _is_asked(planned.control.of(n).shard))
    found = choose_dimensions(planner, (planned.program, planned.body), fixed)
    axis = axes.names[axes.stored]
    return {name: {axis: dim} for name, dim in found.dimensions.items()}, found


def with_advice(planned: Planned) -> Planned:
    """The step with a line in its plan that says how its state is better stored, if its
    leaves stay where they are, or give only the rows that are asked of them, and that
    saves a fifth of what it still sends."""
    choice, sent = planned.stationary, planned.lookups.after
    if choice.stays:
        sent = choice.staying
    if sent.bytes < STATIONARY_BYTES:
        return planned
    dims, found = dimensions_of(planned)
    if not dims:
        return planned
    names = listed(sorted(dims), SHOWN_LEAVES)
    line = (
        f"with shard_for=(state, batch), stored by use: {found.text}, by other "
        f"dimensions of {names} (at least {STATIONARY_SHARE:.0%} saved: "
        "limits.STATIONARY_SHARE)"
    )
    return replace(planned, notes=(*planned.notes, line))


def _is_asked(shard: tuple[StoredAxis, ...] | None) -> bool:
    """Whether `shard` asks for the dimension of a leaf, or for several axes."""
    return len(shard or ()) > 1 or any(not isinstance(x, str) for x in shard or ())


def stored_by_use(shard: Any, dims: Mapping[str, Mapping[str, int]]) -> Any:
    """The option `shard` that stores leaves on these dimensions, and others as `shard`
    says; nothing if there are none."""
    others = shard if isinstance(shard, Mapping) else {"*": shard}
    others = {} if shard is None else others
    return {"shard": {**dims, **others}} if dims else {}
