"""Branches of which the platform alone decides, as of `jax.lax.platform_dependent`.

In: an equation, and the platform that the step is planned for. Out: the branch that it
runs there, which is lowered for no other one.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from shardfn._core import compat
from shardfn._core.errors import where
from shardfn._core.one_platform import only_on


def branch_on(
    eqn: JaxprEqn, operands: Sequence[Any], platform: str
) -> tuple[Any, tuple[Any, ...]] | None:
    """What `eqn` runs on a platform, and its operands; None if something else decides,
    or the platform is not known."""
    found = compat.platform_branch(eqn, operands, platform)
    if found is None or not eqn.outvars:
        return found
    closed, given = found
    jaxpr = closed.jaxpr
    first, *others = jaxpr.outvars
    bound = compat.traced_equation(
        lambda x: only_on(x, platform, where(eqn)), eqn, [first.aval]
    ).replace(invars=[first])
    ends = jaxpr.replace(eqns=[*jaxpr.eqns, bound], outvars=[*bound.outvars, *others])
    return closed.replace(jaxpr=ends), given
