"""Jaxprs opened and closed, and made of others.

In: jaxprs, open or closed. Out: the same without dead code or refs, or with other
equations.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src.state import discharge as _discharge
from jax._src.state.types import AbstractRef as _AbstractRef
from jax.extend import core
from jax.extend.core import JaxprEqn
from jax.interpreters import partial_eval as _partial_eval

from shardfn._core.compat.arrays import abstract
from shardfn._core.compat.settings import at_top_level
from shardfn._core.compat.source_lines import as_user_code


def open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """The jaxpr without its constants, and the constants: one type or two, by version;
    none of a jaxpr that is open already."""
    if not hasattr(jaxpr, "consts"):
        return jaxpr, ()
    return jaxpr.jaxpr, tuple(jaxpr.consts)


def close_jaxpr(jaxpr: Any) -> Any:
    """A closed jaxpr of `jaxpr`, which may be closed already or have no constants."""
    return jaxpr if hasattr(jaxpr, "consts") else core.ClosedJaxpr(jaxpr, ())


def with_equations(jaxpr: Any, change: Callable[[JaxprEqn], JaxprEqn]) -> Any:
    """A jaxpr, closed or not, with each of its equations changed."""
    inner, _ = open_jaxpr(jaxpr)
    eqns = [change(eqn) for eqn in inner.eqns]
    if type(inner) is type(jaxpr):
        return jaxpr.replace(eqns=eqns)
    return jaxpr.replace(jaxpr=inner.replace(eqns=eqns))


def traced_equation(run: Any, like: JaxprEqn, avals: Sequence[Any]) -> JaxprEqn:
    """The one equation that `run` makes of such arguments, in the place of `like`."""
    with at_top_level(), as_user_code(like):
        closed = jax.make_jaxpr(run)(*map(abstract, avals))
    (eqn,) = open_jaxpr(closed)[0].eqns
    return eqn


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """Numbers of constants and of carries of a scan equation."""
    if "ft_in" in eqn.params:
        consts, carry, _ = eqn.params["ft_in"].unpack()
        return len(consts), len(carry)
    return eqn.params["num_consts"], eqn.params["num_carry"]


def without_dead_code(closed: Any) -> Any:
    """`closed` without equations that no output needs, also inside control flow."""
    jaxpr, consts = open_jaxpr(closed)
    jaxpr, _ = _partial_eval.dce_jaxpr(
        jaxpr, [True] * len(jaxpr.outvars), instantiate=True
    )
    return jaxpr if hasattr(jaxpr, "consts") else core.ClosedJaxpr(jaxpr, consts)


def takes_refs(jaxpr: Any) -> bool:
    """Whether arguments of a jaxpr are references, as those of a kernel are."""
    return any(isinstance(v.aval, _AbstractRef) for v in jaxpr.invars)


def without_refs(closed: Any) -> Any:
    """`closed` with the arrays that it makes by `jax.new_ref` and changes in place as
    plain values, which loops carry; what `jax.jit` does before it compiles."""
    if not any(is_internal_ref_effect(effect) for effect in closed.effects):
        return closed
    return _discharge.discharge_state(closed)


def is_debug_effect(effect: Any) -> bool:
    """Whether this is the effect of an unordered `jax.debug.print` or `callback`."""
    return type(effect).__name__ == "DebugEffect"


def is_check_effect(effect: Any) -> bool:
    """Whether this is the effect of a `checkify.check`."""
    from jax._src.checkify import ErrorEffect  # most steps have no effects

    return isinstance(effect, ErrorEffect)


def is_internal_ref_effect(effect: Any) -> bool:
    """Whether this is the effect of arrays that are made and changed in place inside
    the traced function."""
    return type(effect).__name__ == "InternalMutableArrayEffect"
