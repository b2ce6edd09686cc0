"""A step that rounds otherwise where it casts to a narrower dtype.

In: a step and its arguments. Out: the same step, in which such casts go one unit of the
narrower dtype up, down, or to where they went. A change of float32 arguments by one
unit of float32 would vanish in a cast to bfloat16, and say nothing about the step.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, jaxpr_as_fun

from shardfn._core import compat

CALLS = (
    *("jit", "pjit", "closed_call", "scan", "while", "cond", "checkpoint", "remat"),
    *("custom_jvp_call", "custom_vjp_call"),
)
"""Primitives that run the jaxprs among their parameters as they are."""


def casting_otherwise(step: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """`step`, jitted, with other casts; itself if it makes no narrower ones.

    Which way an element goes is decided by its last bits before the cast: it changes
    with the rounding of the arguments, and asks for no random numbers.
    """
    closed, out = jax.make_jaxpr(step, return_shape=True)(*args)
    found: list[JaxprEqn] = []
    run = jax.jit(jaxpr_as_fun(_rewritten(closed, found)))
    structure = jax.tree.structure(out)
    if not found:
        return step
    return lambda *args: jax.tree.unflatten(structure, run(*jax.tree.leaves(args)))


def _rewritten(jaxpr: Any, found: list[JaxprEqn]) -> Any:
    def inside(param: Any) -> Any:
        if isinstance(param, tuple):
            return tuple(map(inside, param))
        is_jaxpr = hasattr(param, "eqns") or hasattr(param, "jaxpr")
        return _rewritten(param, found) if is_jaxpr else param

    def changed(eqn: JaxprEqn) -> JaxprEqn:
        if _is_narrowing(eqn):
            found.append(eqn)
            cast = jax.jit(lambda x: _cast(x, eqn.params["new_dtype"]))
            new = compat.traced_equation(cast, eqn, [eqn.invars[0].aval])
            return eqn.replace(primitive=new.primitive, params=new.params)
        if eqn.primitive.name not in CALLS:
            return eqn
        params = {name: inside(value) for name, value in eqn.params.items()}
        return eqn.replace(params=params)

    return compat.with_equations(jaxpr, changed)


def _is_narrowing(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name != "convert_element_type":
        return False
    before, after = (compat.abstract(v.aval).dtype for v in (*eqn.invars, *eqn.outvars))
    floats = all(jnp.issubdtype(d, jnp.floating) for d in (before, after))
    return floats and bool(jnp.finfo(after).eps > jnp.finfo(before).eps)


def _cast(x: jax.Array, dtype: Any) -> jax.Array:
    """`x` cast to a narrower dtype, its elements moved by a unit of it at most; whole
    numbers stay."""
    size = 8 * x.dtype.itemsize
    word = jnp.dtype(f"uint{size}")
    mixed = lax.bitcast_convert_type(x, word) * jnp.asarray(40503, word)
    way = lax.rem(mixed >> jnp.asarray(size // 2, word), jnp.asarray(3, word))
    way = way.astype(x.dtype) - jnp.ones((), x.dtype)
    moved = x + x * way * jnp.asarray(jnp.finfo(dtype).eps, x.dtype)
    return jnp.where(x == jnp.round(x), x, moved).astype(dtype)
