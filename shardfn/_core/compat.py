"""The only place that knows JAX versions and JAX's private modules.

Each function hides one difference between JAX 0.10, 0.11 and 0.12, or one private name.
"""

import contextlib
import dataclasses
import functools
import importlib
import os
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import core as core_types
from jax import numpy as jnp
from jax._src import config as _config
from jax._src import core as _core
from jax._src import distributed as _distributed
from jax._src import dtypes as _dtypes
from jax._src import pmap as _private_pmap
from jax._src import source_info_util as _source_info
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import partial_eval as _private_partial_eval
from jax._src.interpreters import pxla as _pxla
from jax._src.state import discharge as _discharge
from jax.extend import core
from jax.extend import random as _extend_random
from jax.extend import source_info_util as _public_source_info
from jax.extend.core import JaxprEqn, Primitive
from jax.extend.core import primitives as _primitives
from jax.interpreters import partial_eval as _partial_eval
from jax.sharding import AxisType, Mesh, NamedSharding

scan_p = _primitives.scan_p
while_p = _primitives.while_p
cond_p = _primitives.cond_p
remat_p = _primitives.remat_p

_INLINED = ("jit", "closed_call", "core_call", "eval_jaxpr")

CUSTOM = ("custom_jvp_call", "custom_vjp_call")
"""Calls of functions with derivatives of their own."""

_POSITIONAL = {"psum": jnp.sum, "pmax": jnp.max, "pmin": jnp.min}

# jax.experimental.sparse: primitives that it writes out in terms of others.
_SPARSE = ("bcoo", "bcsr", "coo", "csr")

CONCRETE_ARRAYS = tuple(
    t
    for name in ("ArrayImpl", "PRNGKeyArray")
    for t in jax.Array.__subclasses__()
    if t.__name__ == name
)
"""The types of arrays that have values, not tracers: of numbers, and of PRNG keys."""

PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
"""The folder that this package is in, with a separator behind it."""

# Frames of this package are not the user's.
_public_source_info.register_exclusion(PACKAGE)

HIDING_FLAGS = ("jax_scan3", "jax_remat3", "jax_custom_vjp3", "jax_custom_jvp3")


def hiding_flags() -> list[str]:
    """Names of the JAX flags now on that hide jaxpr bodies from an interpreter."""
    return [name for name in HIDING_FLAGS if getattr(jax.config, name, False)]


def open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """The jaxpr without its constants, and the constants: one type or two, by version;
    none of a jaxpr that is open already."""
    if not hasattr(jaxpr, "consts"):
        return jaxpr, ()
    return jaxpr.jaxpr, tuple(jaxpr.consts)


def inlined_body(eqn: JaxprEqn) -> Any | None:
    """What an equation that is no operation of its own stands for, else None.

    That is the body of a call (jit, ...), of a solve whose derivative is known (the
    solver itself), and of a while loop under `jax.vmap`, whose condition is an array;
    of a `jax.device_put` of a pytree, one for every leaf.
    """
    name = eqn.primitive.name
    if name in _INLINED:
        params = eqn.params
        return params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
    if name == "while" and close_jaxpr(eqn.params["cond_jaxpr"]).out_avals[0].shape:
        return _traced(eqn, lambda *xs: _loop_while_any(eqn, xs))
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


UNREDUCED_COLLECTIVES = (
    *("unreduced_psum", "unreduced_pmax", "unreduced_pmin", "preduced"),
    *("unreduced_reduce_scatter", "all_gather_reduced"),
    *("vary_unreduced_cast", "vary_unreduced_cast_p"),
)
"""Collectives of arrays whose types say that their sums over devices are not taken."""

DimAxes = tuple[tuple[str, ...], ...]
"""Per dimension, the mesh axes that split it."""


@dataclasses.dataclass(frozen=True, slots=True)
class MappedPart:
    """What a `jax.shard_map` equation runs.

    Attributes:
      jaxpr: of one device.
      sizes: its manual mesh axes, and how many devices each has.
      in_specs: how its operands are split.
      out_specs: how its results are.
    """

    jaxpr: Any
    sizes: dict[str, int]
    in_specs: tuple[DimAxes, ...]
    out_specs: tuple[DimAxes, ...]


def mapped_part(eqn: JaxprEqn) -> MappedPart | None:
    """What a `jax.shard_map` equation of the user's runs; None of one that this package
    made, or whose specs say more than what is split over manual mesh axes."""
    params = eqn.params
    mapped_in = params["jaxpr"].debug_info.func_filename or ""
    if mapped_in.startswith(PACKAGE):
        return None
    shape, manual = params["mesh"].shape, params["newly_manual_axes"]
    specs = (*params["in_specs"], *params["out_specs"])
    if any(spec.unreduced or spec.reduced for spec in specs):
        return None

    def dims(v: Any, spec: Any) -> DimAxes:
        entries = [*spec, *[None] * (v.aval.ndim - len(spec))]
        return tuple(
            () if e is None else e if isinstance(e, tuple) else (e,) for e in entries
        )

    return MappedPart(
        jaxpr=params["jaxpr"],
        sizes={name: shape[name] for name in shape if name in manual},
        in_specs=tuple(map(dims, eqn.invars, params["in_specs"])),
        out_specs=tuple(map(dims, eqn.outvars, params["out_specs"])),
    )


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


def bind_again(eqn: JaxprEqn, *args: Any) -> Sequence[Any]:
    """The results of `eqn` on other operands."""
    params: Any = eqn.primitive.get_bind_params(eqn.params)
    return eqn.primitive.bind(*args, **params)


def abstract(aval: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
    """What to trace on for an argument like `aval`, perhaps typed by a sharding."""
    weak = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, weak_type=weak, sharding=sharding
    )


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


def without_refs(closed: Any) -> Any:
    """`closed` with the arrays that it makes by `jax.new_ref` and changes in place as
    plain values, which loops carry; what `jax.jit` does before it compiles."""
    if not any(is_internal_ref_effect(effect) for effect in closed.effects):
        return closed
    return _discharge.discharge_state(closed)


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
    held = [every] * len(consts)
    held += [
        not ahead and (every or not weight)
        for weight, ahead in zip(weights, early, strict=True)
    ]
    held += [False] * len(imports)
    prevent_cse = all(held) or tuple(held)
    params = {**eqn.params, "jaxpr": jaxpr, "prevent_cse": prevent_cse}
    return eqn.primitive.bind(*consts, *args, *imports, **params)


def platform_of(compiled: jax.stages.Compiled) -> str:
    """What a program was compiled for, such as "cpu"; "" if nothing comes in or out."""
    ends = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return next((d.platform for end in ends for d in end.device_set), "")


def merges_gathers(platform: str) -> bool:
    """Whether the compiler for a platform merges equal operations that an optimization
    barrier keeps apart: XLA for CPUs did, in straight-line code."""
    return platform == "cpu" and jax.__version_info__ < (0, 11)


def varying_axes(x: jax.Array) -> frozenset[str]:
    """The manual mesh axes over which the type of `x` says that it varies."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)  # pyright: ignore


def checks_types() -> bool:
    """Whether the `shard_map` around checks over which mesh axes values vary."""
    return bool(_config._check_vma.value)


def varying_alike(operands: Sequence[jax.Array]) -> list[jax.Array]:
    """`operands` cast to vary along the same mesh axes, as primitives demand."""
    axes = [varying_axes(x) for x in operands]
    every = frozenset().union(*axes)
    return [
        cast_varying(x, tuple(sorted(every - own)))
        for x, own in zip(operands, axes, strict=True)
    ]


def cast_varying(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """`x` cast to vary along the mesh axes `names` too.

    Its derivative sums cotangents over these, in float32 where the compiler cannot sum
    those of its own dtype.
    """
    if not names:
        return x
    if str(x.dtype) not in dtypes_without_sum(*bound_platform()):
        return jax.lax.pcast(x, names, to="varying")
    wide = jax.lax.convert_element_type(x, jnp.float32)
    wide = jax.lax.pcast(wide, names, to="varying")
    return with_weak_type(jax.lax.convert_element_type(wide, x.dtype), x.weak_type)  # pyright: ignore


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


def with_line_of(eqn: JaxprEqn, call: JaxprEqn) -> JaxprEqn:
    """`eqn`, said to come from the user's line of `call` if it comes from none itself,
    as the equations of JAX's own jitted functions do."""
    if ":" in summarize(eqn):
        return eqn
    traceback = call.source_info.traceback
    return eqn.replace(source_info=eqn.source_info.replace(traceback=traceback))


FORWARD, BACKWARD = "forward", "backward"


def derivatives(eqn: JaxprEqn) -> tuple[str, ...]:
    """Of the gradients that an equation was made for, from the outside, whether it is
    in their forward or backward pass.

    JAX notes transforms and the user's name scopes in frames of different types. The
    transpose of an equation has the frame of its `jvp`, too. `jax.jvp` alone is noted
    as the forward pass of a gradient is.
    """
    frames = eqn.source_info.name_stack.stack
    names = [f.name for f in frames if isinstance(f, _source_info.Transform)]
    made_by = [name for name in names if name in ("jvp", "transpose")]
    out: list[str] = []
    for before, name in zip(["", *made_by], made_by, strict=False):
        if name == "transpose":
            out.append(BACKWARD)
        elif before != "transpose":
            out.append(FORWARD)
    return tuple(out)


def is_repeated(eqn: JaxprEqn) -> bool:
    """Whether rematerialization repeats an equation that the forward pass has run."""
    frames = eqn.source_info.name_stack.stack
    return _source_info.Scope("rematted_computation") in frames


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


def is_internal_ref_effect(effect: Any) -> bool:
    """Whether this is the effect of arrays that are made and changed in place inside
    the traced function."""
    return type(effect).__name__ == "InternalMutableArrayEffect"


@dataclasses.dataclass(frozen=True, slots=True)
class Pmapped:
    """What a `jax.pmap` was told: `axis_name` is None if none was given."""

    axis_name: str | None
    in_axes: Any
    static_argnums: tuple[int, ...]


def pmapped(fn: Any) -> Pmapped | None:
    """What `jax.pmap` was told of a function that it returned; None of other ones."""
    made = getattr(fn, "__code__", None)
    if made is None or made.co_filename != _private_pmap.__file__:
        return None
    told = _closed_over(_closed_over(fn).get("infer_params"))
    if "axis_name" not in told:
        return None
    name = told["axis_name"]
    return Pmapped(
        axis_name=name if isinstance(name, str) and "_internal" not in name else None,
        in_axes=told.get("in_axes", 0),
        static_argnums=tuple(told.get("static_broadcasted_tuple", ())),
    )


def _closed_over(fn: Any) -> dict[str, Any]:
    """What a function has captured, by name."""
    names = fn.__code__.co_freevars if fn is not None else ()
    cells = fn.__closure__ or () if fn is not None else ()
    return {n: cell.cell_contents for n, cell in zip(names, cells, strict=True)}


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


def mesh_lacking(error: ValueError, is_set: Any, given: Any) -> Any | None:
    """The mesh with explicit axes for want of which an operation failed that names its
    axes; None if that is not why.

    Args:
      error: what JAX raised.
      is_set: the mesh that is set around the call.
      given: the mesh that arrays are on, or None.
    """
    text = str(error)
    needs_set = (
        "when you are not under a mesh context",
        "context mesh cannot be empty",
    )
    if has_types(is_set):
        is_why = any(part in text for part in (*needs_set, _MISTYPED))
        return is_set if is_why else None
    typed = given is not None and has_types(given)
    return given if typed and not is_set.axis_names and _MISTYPED in text else None


_MISTYPED = "in_specs passed to shard_map: "


def has_types(mesh: Any) -> bool:
    """Whether a mesh has explicit axes, and so is part of its arrays' types."""
    return AxisType.Explicit in mesh.axis_types


def is_explicit(x: jax.Array) -> bool:
    """Whether the type of `x` names a mesh with explicit axes."""
    return has_types(jax.typeof(x).sharding.mesh)


def is_typed(sharding: Any) -> bool:
    """Whether a sharding is one of a mesh with explicit axes, and so part of types."""
    return isinstance(sharding, NamedSharding) and has_types(sharding.mesh)


def untyped_array(x: Any) -> Any:
    """A captured array as before, but on the same mesh with all axes automatic: bodies
    of `shard_map` cannot close over one that is typed by its mesh."""
    if not isinstance(x, jax.Array) or is_traced(x) or not is_typed(x.sharding):
        return x
    mesh, spec = x.sharding.mesh, x.sharding.spec  # pyright: ignore
    types = (AxisType.Auto,) * len(mesh.axis_names)
    untyped = Mesh(mesh.devices, mesh.axis_names, axis_types=types)
    return jax.device_put(x, NamedSharding(untyped, spec))


def untyped_axes_of_one_device() -> contextlib.AbstractContextManager[Any]:
    """A context in which types do not say what is split over a mesh axis of one device:
    it is whole, and need not be said to be split where that is asked for."""
    return _config.remove_size_one_mesh_axis_from_type(True)


def untyped_value(x: Any) -> Any:
    """A literal or constant of a jaxpr, typed by no mesh: JAX's arrays on the host keep
    the type of the place where they were first used."""
    return x.view() if isinstance(x, np.ndarray) else untyped_array(x)


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


@contextlib.contextmanager
def without_mesh() -> Iterator[None]:
    """Traces as at the top level, where no mesh is set."""
    with (
        at_top_level(),
        jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())),
    ):
        yield


@contextlib.contextmanager
def at_top_level() -> Iterator[None]:
    """Traces as outside of every transform: no axis name is bound, no mesh is set but
    one without types, whose axes `with_sharding_constraint` may name."""
    bound = _core.trace_ctx.axis_env
    mesh = jax.sharding.get_abstract_mesh()
    is_untyped = all(t is AxisType.Auto for t in mesh.axis_types)
    untyped = mesh if is_untyped else jax.sharding.AbstractMesh((), ())
    with jax.sharding.use_abstract_mesh(untyped), _config._check_vma(False):
        _core.trace_ctx.set_axis_env(_core.top_axis_env)
        try:
            yield
        finally:
            _core.trace_ctx.set_axis_env(bound)


def dtypes_without_sum(platform: str, has_automatic_axes: bool) -> tuple[str, ...]:
    """The dtypes whose sums over manual mesh axes end the process in the compiler.

    XLA's CPU compiler promotes all-reduces and reduce-scatters of bfloat16, and fails
    on the computation that JAX gives them where other mesh axes, even of one device,
    are automatic. It does all other dtypes, and all other collectives of bfloat16.
    """
    return ("bfloat16",) if platform == "cpu" and has_automatic_axes else ()


def bound_platform() -> tuple[str, bool]:
    """The platform that the surrounding `shard_map` is for, as far as JAX knows it, and
    whether some axes of its mesh are automatic."""
    mesh = jax.sharding.get_abstract_mesh()
    device = getattr(mesh, "abstract_device", None)
    platform = getattr(device, "platform", None) or jax.default_backend()
    return platform, bool(automatic_axes())


def broadcasts_ranks() -> contextlib.AbstractContextManager[Any]:
    """A context in which arrays of different ranks broadcast: what
    `jax_numpy_rank_promotion` forbids users, this package's own operations may do."""
    return jax.numpy_rank_promotion("allow")


def automatic_axes() -> frozenset[str]:
    """The mesh axes that are automatic in the surrounding `shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    each = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in each if kind is not AxisType.Manual)


def checks_values() -> bool:
    """Whether `jax_debug_nans` or `jax_debug_infs` is on: JAX then runs a step that
    made such a value a second time, on the same arguments."""
    return bool(_config.debug_nans.value or _config.debug_infs.value)


def jit_enabled() -> contextlib.AbstractContextManager[Any]:
    """A context in which `jax.jit` compiles, whatever `jax.disable_jit` says around."""
    if not _config.disable_jit.value:
        return contextlib.nullcontext()
    return jax.disable_jit(False)


def is_tracing() -> bool:
    """Whether a transform is tracing here, or an evaluation under one runs."""
    return not _core.trace_state_clean()


@contextlib.contextmanager
def evaluating() -> Iterator[None]:
    """Operations on arrays that have values run at once, whatever is traced around them
    and whatever mesh is set."""
    with jax.ensure_compile_time_eval(), at_top_level():
        yield


def register_array(cls: type, whole: Callable[[Any], jax.Array]) -> None:
    """Makes JAX take objects of a class for arrays, as it does its own PRNG keys.

    Args:
      cls: a subclass of `jax.Array` with an attribute `aval`.
      whole: what makes one an array of JAX's own.
    """

    def shard(xs: Any, shardings: Any, layouts: Any, copies: Any) -> Any:
        return _pxla.shard_args(shardings, layouts, copies, list(map(whole, xs)))

    def constant(val: Any, aval: Any) -> Any:
        return _mlir.get_constant_handler(CONCRETE_ARRAYS[0])(whole(val), aval)

    _core.pytype_aval_mappings[cls] = lambda x: x.aval
    _pxla.shard_arg_handlers[cls] = shard
    _mlir.register_constant_handler(cls, constant)
    if hasattr(_dtypes, "register_canonicalize_value_handler"):
        _dtypes.register_canonicalize_value_handler(cls, None)
    else:
        _dtypes.canonicalize_value_handlers[cls] = lambda x: x


def aval_of(x: jax.ShapeDtypeStruct) -> Any:
    """The type that JAX gives an array of this shape, dtype and sharding."""
    aval = _core.ShapedArray(x.shape, x.dtype, weak_type=x.weak_type)
    return _core.update_aval_with_sharding(aval, x.sharding)


def compiler_settings() -> list[str]:
    """Names of the settings of the compiler's effort that are not JAX's own."""
    names = ("exec_time_optimization_effort", "optimization_level")
    defaults = (0.0, "UNKNOWN")
    return [
        name
        for name, default in zip(names, defaults, strict=True)
        if jax.config.values.get(f"jax_{name}", default) != default
    ]


def configuration() -> Hashable:
    """The settings of JAX that a trace depends on, as `jax.jit` keys its traces by."""
    with at_top_level():
        return _config.trace_context()


def distributed_client() -> Any:
    """What `jax.distributed` connects this process to the others with, or None."""
    return _distributed.global_state.client


def unbound_axis(error: NameError) -> str | None:
    """The axis name that a traced function uses without binding it, if that is why;
    whatever is in the name."""
    advice = r"\. To fix this, please call \w+ under `jax\.shard_map`\."
    found = re.search(rf"unbound axis name: (.*?)(?:{advice})?\Z", str(error), re.S)
    return found[1] if found else None
