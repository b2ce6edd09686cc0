"""What a step must not do: have side effects, use tracers of other traces, or divide
its arrays over devices by itself.

In: a traced step. Out: nothing; or an error that shows the user's line.
"""

from typing import Any

from jax.extend.core import jaxprs_in_params

from shardfn._core import compat
from shardfn._core.errors import (
    UNKNOWN,
    ShardingError,
    called,
    nested,
    step_name,
    where,
    where_in,
)


def leaked_tracer() -> ShardingError:
    """The error for a step that uses a tracer of an earlier trace."""
    return ShardingError(
        f"{step_name()} is not pure: it uses a tracer that an earlier trace left "
        "behind, for example in a global, a list or an object.\n"
        f"{called()}"
        "Return the value from the step, or pass it in as an argument."
    )


def check_effects(jaxpr: Any) -> None:
    found = [e for e in jaxpr.effects if not compat.is_debug_effect(e)]
    effects = sorted({type(e).__name__ for e in found})
    if not effects:
        return
    place = _place_of_effect(jaxpr)
    if all(map(compat.is_check_effect, found)):
        raise ShardingError(
            f"{step_name()} has a checkify.check whose error nothing takes.\n"
            f"  at {place}\n"
            f"{called()}"
            "Take it inside the step, and return it among the metrics: "
            "error, out = checkify.checkify(function)(...). What is around the "
            "sharded step is not seen by fully_shard."
        )
    raise ShardingError(
        f"{step_name()} is not pure: it has a side effect ({', '.join(effects)}), "
        "which every device would repeat.\n"
        f"  at {place}\n"
        f"{called()}"
        "Return the value as a metric instead, and print or store it outside the step."
    )


def calls_the_host() -> ShardingError:
    """The error for a step that prints, compiled for GPUs that are not there."""
    return ShardingError(
        f"{step_name()} prints or calls back to the host, and a program for GPUs that "
        "are not there has no host to call.\n"
        f"{called()}"
        "Leave jax.debug.print out where you compile for them. What it prints is no "
        "part of what the step costs."
    )


def check_not_mapped(jaxpr: Any) -> None:
    """Raises if a part of the step is divided over devices already."""
    for eqns in nested(jaxpr):
        if eqns[-1].primitive.name == "shard_map":
            raise ShardingError(
                f"{step_name()} uses jax.shard_map, whose parts fully_shard cannot "
                f"divide again.\n  at {where_in(eqns)}\n{called()}"
                "If it calls a step that fully_shard made, call the plain step there. "
                "A shard_map of your own may split arrays over axes of the mesh that "
                "fully_shard is given, not of another: write such a part on whole "
                "arrays, or as an operation with a rule of its own "
                "(shardfn.register_rule)."
            )


def _place_of_effect(jaxpr: Any) -> str:
    """The user's line of the innermost equation with a side effect."""
    for eqn in compat.open_jaxpr(jaxpr)[0].eqns:
        if any(not compat.is_debug_effect(e) for e in eqn.effects):
            bodies = list(jaxprs_in_params(eqn.params))
            return _place_of_effect(bodies[0]) if bodies else where(eqn)
    return UNKNOWN
