"""The only place that knows JAX versions and JAX's private modules.

Each function hides one difference between JAX 0.10, 0.11 and 0.12, or one private name.
"""

import contextlib
import functools
import importlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax import core as core_types
from jax import numpy as jnp
from jax._src import config as _config
from jax._src import core as _core
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import partial_eval as _private_partial_eval
from jax.extend import core
from jax.extend import random as _extend_random
from jax.extend import source_info_util as _public_source_info
from jax.extend.core import JaxprEqn, Primitive
from jax.extend.core import primitives as _primitives
from jax.interpreters import partial_eval as _partial_eval
from jax.sharding import AxisType

scan_p = _primitives.scan_p
while_p = _primitives.while_p
cond_p = _primitives.cond_p
remat_p = _primitives.remat_p

_INLINED = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "eval_jaxpr": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}

_POSITIONAL = {"psum": jnp.sum, "pmax": jnp.max, "pmin": jnp.min}

CONCRETE_ARRAYS = tuple(
    t for t in jax.Array.__subclasses__() if t.__name__ in ("ArrayImpl", "PRNGKeyArray")
)
"""The types of arrays that have values: not tracers."""

# Frames of this package are not the user's.
_public_source_info.register_exclusion(os.path.dirname(__file__) + os.sep)

HIDING_FLAGS = ("jax_scan3", "jax_remat3", "jax_custom_vjp3", "jax_custom_jvp3")


def hiding_flags() -> list[str]:
    """Names of the JAX flags now on that hide jaxpr bodies from an interpreter."""
    return [name for name in HIDING_FLAGS if getattr(jax.config, name, False)]


def open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """The jaxpr without its constants, and the constants: one type or two, by
    version."""
    return jaxpr.jaxpr, tuple(jaxpr.consts)


def inlined_body(eqn: JaxprEqn) -> Any | None:
    """The body of an equation that only calls it (jit, custom_jvp, ...), else None."""
    key = _INLINED.get(eqn.primitive.name)
    if key is None and eqn.primitive.name in _POSITIONAL:
        return _positional_body(eqn)
    return eqn.params.get(key) if key else None


def _positional_body(eqn: JaxprEqn) -> Any | None:
    """A collective over dimensions, which `jax.vmap` makes, as reductions of them."""
    axes = eqn.params["axes"]
    if not all(isinstance(axis, int) for axis in axes):
        return None
    reduce = _POSITIONAL[eqn.primitive.name]
    with as_user_code(eqn):
        avals: list[Any] = [v.aval for v in eqn.invars]
        return jax.make_jaxpr(lambda *xs: [reduce(x, axis=axes) for x in xs])(
            *(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals)
        )


def close_jaxpr(jaxpr: Any) -> Any:
    """A closed jaxpr of `jaxpr`, which may be closed already or have no constants."""
    return jaxpr if hasattr(jaxpr, "consts") else core.ClosedJaxpr(jaxpr, ())


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


def bind_remat(eqn: JaxprEqn, body: Any, *args: jax.Array) -> Sequence[jax.Array]:
    """Binds `eqn`'s remat primitive with another body, `body(*args)` on local values.

    The parameter `differentiated` is what makes its lowering put an optimization
    barrier around the recomputation, and `jax.checkpoint` cannot set it.
    """
    closed = jax.make_jaxpr(body)(*args)
    jaxpr, consts = open_jaxpr(closed)
    jaxpr = _private_partial_eval.convert_constvars_jaxpr(jaxpr)
    params = {**eqn.params, "jaxpr": jaxpr}
    if isinstance(params["prevent_cse"], tuple):
        params["prevent_cse"] = any(params["prevent_cse"])
    return eqn.primitive.bind(*consts, *args, **params)


def varying_axes(x: jax.Array) -> frozenset[str]:
    """The manual mesh axes over which the type of `x` says that it varies."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)  # pyright: ignore


def with_weak_type(x: jax.Array, weak: bool) -> jax.Array:
    """`x` with its weak type set to `weak`."""
    from jax._src.lax import lax as lax_internal

    if x.weak_type == weak:  # pyright: ignore
        return x
    out: Any = lax_internal._convert_element_type(x, x.dtype, weak_type=weak)
    return out


def summarize(eqn: JaxprEqn) -> str:
    """`file:line:column (function)` of the user's code that made an equation."""
    return _public_source_info.summarize(eqn.source_info)


def name_stack(eqn: JaxprEqn) -> str:
    """The name scopes and transforms that an equation was made under."""
    return str(eqn.source_info.name_stack)


def as_user_code(eqn: JaxprEqn) -> Any:
    """A context in which bound primitives keep `eqn`'s source line and name scopes."""
    stack = _public_source_info.current_name_stack() + eqn.source_info.name_stack
    return _public_source_info.user_context(eqn.source_info.traceback, name_stack=stack)


def is_key(dtype: Any) -> bool:
    """Whether this is the dtype of PRNG keys."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def is_debug_effect(effect: Any) -> bool:
    """Whether this is the effect of an unordered `jax.debug.print` or `callback`."""
    return type(effect).__name__ == "DebugEffect"


def is_mapped(x: Any, name: str | None = None) -> bool:
    """Whether `x`, inside the innermost `jax.vmap`, depends on what is mapped over."""
    is_batched = isinstance(x, _batching.BatchTracer) and x.batch_dim is not None
    return is_batched and (name is None or x._trace.axis_data.name == name)


def is_traced(x: Any) -> bool:
    """Whether `x` is a tracer, which has no values yet."""
    return isinstance(x, core_types.Tracer)


def primitive(name: str) -> Primitive | None:
    """The JAX primitive called `name`, or None where this JAX version has none."""
    from jax import lax

    return getattr(lax, f"{name}_p", None)


@functools.cache
def _primitives_by_name() -> dict[str, Primitive]:
    """Every primitive that JAX exports, and the private ones that user code binds."""
    modules = [jax.lax, jax.lax.linalg, _primitives, _extend_random]
    for name in ("lax.lax", "lax.linalg", "random.prng", "random.core", "dispatch"):
        modules.append(importlib.import_module(f"jax._src.{name}"))
    for name in ("pjit", "lax.control_flow.conditionals", "ad_util"):
        modules.append(importlib.import_module(f"jax._src.{name}"))
    found = (v for m in modules for v in vars(m).values() if isinstance(v, Primitive))
    return {p.name: p for p in found}


def primitives(*names: str) -> tuple[Primitive, ...]:
    """The primitives of these names; names that this JAX does not have are left out."""
    known = _primitives_by_name()
    return tuple(known[name] for name in names if name in known)


def beta_types_vary() -> bool:
    """Whether `lax.betainc` runs on values that vary over a manual mesh axis."""
    return jax.__version_info__ >= (0, 12)


def is_explicit(x: jax.Array) -> bool:
    """Whether the type of `x` names a mesh with explicit axes."""
    return AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types


@contextlib.contextmanager
def at_top_level() -> Iterator[None]:
    """Traces as outside of every transform: no mesh is set, no axis name is bound."""
    bound = _core.trace_ctx.axis_env
    empty = jax.sharding.AbstractMesh((), ())
    with jax.sharding.use_abstract_mesh(empty), _config._check_vma(False):
        _core.trace_ctx.set_axis_env(_core.top_axis_env)
        try:
            yield
        finally:
            _core.trace_ctx.set_axis_env(bound)
