"""What equations call.

In: an equation. Out: its body, if running that is the same as running the equation:
calls that are inlined, `pjit`, functions with derivatives of their own, sparse arrays.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax, numpy as jnp
from jax._src import core as _core
from jax._src.interpreters import mlir as _mlir
from jax.extend import core
from jax.extend.core import JaxprEqn

from shardfn._core.compat.arrays import abstract
from shardfn._core.compat.jaxprs import close_jaxpr, scan_counts
from shardfn._core.compat.primitives import cond_p, scan_p
from shardfn._core.compat.source_lines import as_user_code

_INLINED = ("jit", "closed_call", "core_call", "eval_jaxpr")

CUSTOM = ("custom_jvp_call", "custom_vjp_call")
"""Calls of functions with derivatives of their own."""

_POSITIONAL = {"psum": jnp.sum, "pmax": jnp.max, "pmin": jnp.min}

# jax.experimental.sparse: primitives that it writes out in terms of others.
_SPARSE = ("bcoo", "bcsr", "coo", "csr")

_LOWER_FUN = _mlir.lower_fun(lambda: None).__code__
"""The code of lowering rules that trace a function."""


def inlined_body(eqn: JaxprEqn) -> Any | None:
    """What an equation that is no operation of its own stands for, else None.

    That is the body of a call (jit, ...), of a solve whose derivative is known (the
    solver itself), and of a while loop under `jax.vmap`, whose condition is an array;
    of a `jax.device_put` of a pytree, one for every leaf. A scan of one iteration is no
    loop either: XLA makes none of it.
    """
    name = eqn.primitive.name
    if name in _INLINED:
        params = eqn.params
        return params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
    if name == "while" and close_jaxpr(eqn.params["cond_jaxpr"]).out_avals[0].shape:
        return _traced(eqn, lambda *xs: _loop_while_any(eqn, xs))
    if eqn.primitive is scan_p and eqn.params["length"] == 1:
        return _traced(eqn, lambda *xs: _iterate_once(eqn, xs))
    if name == "device_put" and len(eqn.invars) > 1:
        return _traced(eqn, lambda *xs: _put_each(eqn, xs))
    if name == "custom_linear_solve":
        return _traced(eqn, lambda *xs: _solve(eqn, xs))
    if name == "call_hi_primitive":
        prim = eqn.params["_prim"]
        return _traced(
            eqn, lambda *xs: prim.expand(*jax.tree.unflatten(prim.in_tree, xs))
        )
    if name in _POSITIONAL and all(isinstance(d, int) for d in eqn.params["axes"]):
        # A collective over dimensions, which `jax.vmap` makes: a reduction of them.
        reduce, axes = _POSITIONAL[name], eqn.params["axes"]
        return _traced(eqn, lambda *xs: [reduce(x, axis=axes) for x in xs])
    if name.partition("_")[0] in _SPARSE:
        run = _sparse(name)
        return _traced(eqn, lambda *xs: run(*xs, **eqn.params)) if run else None
    return None


def platform_branch(
    eqn: JaxprEqn, operands: Sequence[Any], platform: str
) -> tuple[Any, tuple[Any, ...]] | None:
    """The branch that `eqn` runs on a platform, and its operands, if it is that alone
    which decides, as of `jax.lax.platform_dependent`; None if not, or if the platform
    is not known."""
    of_platforms = eqn.params.get("branches_platforms")
    if eqn.primitive is not cond_p or not of_platforms or not platform:
        return None
    named = [i for i, names in enumerate(of_platforms) if platform in (names or ())]
    others = [i for i, names in enumerate(of_platforms) if names is None]
    found = [*named, *others]
    if not found:
        return None
    return close_jaxpr(eqn.params["branches"][found[0]]), tuple(operands[1:])


def called_body(eqn: JaxprEqn) -> Any | None:
    """The body of a call (jit, ...), None of other equations."""
    return inlined_body(eqn) if eqn.primitive.name in _INLINED else None


def calling(closed: Any, eqn: JaxprEqn) -> JaxprEqn:
    """A call of a closed jaxpr in the place of `eqn`."""
    return eqn.replace(
        primitive=_core.closed_call_p,
        params={"call_jaxpr": closed},
        effects=closed.effects,
    )


def traced_lowering(eqn: JaxprEqn) -> Any | None:
    """What a primitive stands for whose lowering JAX traces from a function, as a
    library's own is by `mlir.lower_fun`; None for another one. Of a function with
    `custom_partitioning` JAX runs, where all axes of a mesh are manual, the function
    itself; over others, what it is written in is left to the partitioner.

    Traced there, inside `shard_map`, the function would see types and meshes that it
    did not see when the step was traced: some compare the two.
    """
    primitive = eqn.primitive
    if primitive.name == "custom_partitioning":
        return eqn.params["call"]
    by_platform = _mlir._platform_specific_lowerings.values()
    if eqn.effects or any(primitive in known for known in by_platform):
        return None
    rule: Any = getattr(_mlir._lowerings.get(primitive), "rule", None)
    if getattr(rule, "__code__", None) is not _LOWER_FUN:
        return None
    cells = dict(zip(rule.__code__.co_freevars, rule.__closure__, strict=True))
    fun, several = (cells[n].cell_contents for n in ("fun", "multiple_results"))
    fun = functools.partial(fun, **eqn.params)
    with contextlib.suppress(Exception):  # what it needs is there where it is lowered
        return _traced(eqn, fun if several else lambda *xs: [fun(*xs)])
    return None


def _traced(eqn: JaxprEqn, fn: Callable[..., Any]) -> Any:
    """The jaxpr of `fn` on the operands of `eqn`."""
    avals = [abstract(v.aval) for v in eqn.invars]
    with as_user_code(eqn):
        return jax.make_jaxpr(fn)(*avals)


def _loop_while_any(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """A loop that goes on while any element of its condition holds, and changes only
    what belongs to those elements, as one with a scalar condition."""
    test = core.jaxpr_as_fun(close_jaxpr(eqn.params["cond_jaxpr"]))
    body = core.jaxpr_as_fun(close_jaxpr(eqn.params["body_jaxpr"]))
    start = eqn.params["cond_nconsts"]
    end = start + eqn.params["body_nconsts"]
    tested, used = operands[:start], operands[start:end]

    def iteration(carry: Sequence[Any]) -> list[Any]:
        (on,) = test(*tested, *carry)
        spread = [on.reshape(on.shape + (1,) * (x.ndim - on.ndim)) for x in carry]
        new = body(*used, *carry)
        return [jnp.where(*c) for c in zip(spread, new, carry, strict=True)]

    return jax.lax.while_loop(
        lambda carry: jnp.any(test(*tested, *carry)[0]), iteration, list(operands[end:])
    )


def _iterate_once(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """A scan of one iteration, without a loop."""
    constants, carries = scan_counts(eqn)
    start = constants + carries
    body = core.jaxpr_as_fun(close_jaxpr(eqn.params["jaxpr"]))
    slices = (lax.squeeze(x, [0]) for x in operands[start:])
    out = body(*operands[:start], *slices)
    return [*out[:carries], *(lax.expand_dims(y, [0]) for y in out[carries:])]


def _put_each(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Moves operands one by one, since they have no dimension in common."""
    each: list[Any] = []
    for i, x in enumerate(operands):
        params = {name: value[i : i + 1] for name, value in eqn.params.items()}
        each += eqn.primitive.bind(x, **params)
    return each


def _solve(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Runs the solver of `lax.custom_linear_solve` on its constants and the right
    sides."""
    lengths = eqn.params["const_lengths"]
    start, end = lengths.matvec + lengths.vecmat, sum(lengths)
    taken = (*operands[start : start + lengths.solve], *operands[end:])
    return core.jaxpr_as_fun(close_jaxpr(eqn.params["jaxprs"].solve))(*taken)


def _sparse(name: str) -> Callable[..., Any] | None:
    module = f"jax.experimental.sparse.{name.partition('_')[0]}"
    return getattr(importlib.import_module(module), f"_{name}_impl", None)
