"""The kind of an equation's node, and the jaxprs that it runs.

In: an equation. Out: whether it is an operation or which control flow, with its closed
jaxprs and what enters and leaves each; and whether equal ones can be merged.
"""

from typing import Any

from shardfn._core import compat, regions
from shardfn._core.constraint import constrain_p
from shardfn._core.regions import Region


def may_merge(eqn: Any) -> bool:
    """Whether one of several equal equations can stand for all."""
    if eqn.effects or eqn.primitive.name in ("optimization_barrier", "name"):
        return False
    return not any(
        hasattr(p, "eqns") or hasattr(p, "jaxpr") for p in eqn.params.values()
    )


def kind_of(eqn: Any) -> tuple[str, list[Any], tuple[Region, ...]]:
    """The kind of an equation's node, the closed jaxprs that it runs, and what enters
    and leaves each."""
    params, sides = eqn.params, (len(eqn.invars), len(eqn.outvars))

    def bodies(*names: str) -> list[Any]:
        return [compat.close_jaxpr(params[name]) for name in names]

    if eqn.primitive is compat.scan_p:
        layout = regions.of_scan(*compat.scan_counts(eqn), *sides)
        return "scan", bodies("jaxpr"), layout
    if eqn.primitive is compat.while_p:
        counts = params["cond_nconsts"], params["body_nconsts"]
        layout = regions.of_while(*counts, len(eqn.invars))
        return "while", bodies("cond_jaxpr", "body_jaxpr"), layout
    if eqn.primitive is compat.cond_p:
        branches = list(map(compat.close_jaxpr, params["branches"]))
        return "cond", branches, regions.of_cond(len(branches), *sides)
    if eqn.primitive is compat.remat_p:
        return "remat", bodies("jaxpr"), regions.of_call(*sides)
    if eqn.primitive.name in compat.CUSTOM:
        return "custom", bodies("call_jaxpr"), regions.of_call(*sides)
    if eqn.primitive.name == "optimization_barrier":
        return "barrier", [], ()
    return "constrain" if eqn.primitive is constrain_p else "op", [], ()
