"""Equations that run again, on other operands.

In: an equation, and operands. Out: its results, bound as JAX bound it.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax._src.interpreters import partial_eval as _private_partial_eval
from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding

from shardfn._core.compat.jaxprs import open_jaxpr
from shardfn._core.compat.source_lines import summarize


def is_type_cast(eqn: JaxprEqn) -> bool:
    """Whether an equation changes only what types say of mesh axes."""
    return eqn.primitive.name in ("pvary", "sharding_constraint", "reshard")


def summed_dimensions(eqn: JaxprEqn) -> frozenset[int]:
    """The dimensions that a collective sum is over, where `jax.vmap` has made them of
    mesh axes; empty if it is no such sum."""
    if eqn.primitive.name != "psum" or len(eqn.invars) != 1:
        return frozenset()
    axes = eqn.params["axes"]
    is_over_dims = all(isinstance(d, int) for d in axes)
    whole = eqn.params.get("axis_index_groups") is None
    return frozenset(axes) if is_over_dims and whole else frozenset()


def rebind(eqn: JaxprEqn, *args: Any) -> Sequence[Any]:
    """The results of `eqn` on other operands."""
    params: Any = eqn.primitive.get_bind_params(eqn.params)
    return eqn.primitive.bind(*args, **params)


def bind_remat(
    eqn: JaxprEqn,
    body: Any,
    args: Sequence[jax.Array],
    weights: Sequence[bool],
    early: Sequence[bool],
    imports: Sequence[jax.Array],
) -> Sequence[jax.Array]:
    """Binds `eqn`'s remat primitive with another body, `body(*args, *imports)` on local
    values.

    The parameter `differentiated` is what makes its lowering put an optimization
    barrier around the recomputation, and `jax.checkpoint` cannot set it. A scan's body
    needs no barrier against common subexpressions, but once the compiler has peeled an
    iteration it would compute that again early, and hold it meanwhile: there the
    barrier holds all but `weights`, whose gathers may run ahead. It never holds what is
    `early`, nor `imports`: nothing is computed of them alone that exists already.
    """
    closed = jax.make_jaxpr(body)(*args, *imports)
    jaxpr, consts = open_jaxpr(closed)
    jaxpr = _private_partial_eval.convert_constvars_jaxpr(jaxpr)
    asked = eqn.params["prevent_cse"]
    every = any(asked) if isinstance(asked, tuple) else asked
    behind_barrier = [every] * len(consts)
    behind_barrier += [
        not ahead and (every or not weight)
        for weight, ahead in zip(weights, early, strict=True)
    ]
    behind_barrier += [False] * len(imports)
    prevent_cse = all(behind_barrier) or tuple(behind_barrier)
    params = {**eqn.params, "jaxpr": jaxpr, "prevent_cse": prevent_cse}
    return eqn.primitive.bind(*consts, *args, *imports, **params)


def with_line_of(eqn: JaxprEqn, call: JaxprEqn) -> JaxprEqn:
    """`eqn`, said to come from the user's line of `call` if it comes from none itself,
    as the equations of JAX's own jitted functions do."""
    if ":" in summarize(eqn):
        return eqn
    traceback = call.source_info.traceback
    return eqn.replace(source_info=eqn.source_info.replace(traceback=traceback))


def untyped_equation(eqn: JaxprEqn) -> JaxprEqn:
    """`eqn` without the sharding that it gives the type of its result, on the mesh that
    was set while it was traced."""
    if eqn.primitive.name == "sharding_constraint":
        return eqn
    params = {
        name: None
        for name in ("sharding", "out_sharding")
        if isinstance(eqn.params.get(name), NamedSharding)
    }
    return eqn.replace(params={**eqn.params, **params}) if params else eqn
