"""JAX's settings and contexts.

In: what is set around a call. Out: what programs depend on, and contexts to trace and
to evaluate in.
"""

import contextlib
from collections.abc import Hashable, Iterator
from typing import Any

import jax
from jax._src import config as _config, core as _core
from jax.sharding import AxisType

HIDING_FLAGS = ("jax_scan3", "jax_remat3", "jax_custom_vjp3", "jax_custom_jvp3")


def hiding_flags() -> list[str]:
    """Names of the JAX flags now on that hide jaxpr bodies from an interpreter."""
    return [name for name in HIDING_FLAGS if getattr(jax.config, name, False)]


@contextlib.contextmanager
def at_top_level(lowers: bool = False) -> Iterator[None]:
    """Traces as outside of every transform: no axis name is bound, no mesh is set but
    one without types, whose axes `with_sharding_constraint` may name. What lowers knows
    the device of the mesh, too."""
    bound = _core.trace_ctx.axis_env
    mesh = jax.sharding.get_abstract_mesh()
    is_untyped = all(t is AxisType.Auto for t in mesh.axis_types)
    device = mesh.abstract_device if lowers else None
    alone = jax.sharding.AbstractMesh((), (), abstract_device=device)
    untyped = mesh if is_untyped else alone
    with jax.sharding.use_abstract_mesh(untyped), _config._check_vma(False):
        _core.trace_ctx.set_axis_env(_core.top_axis_env)
        try:
            yield
        finally:
            _core.trace_ctx.set_axis_env(bound)


def broadcasts_ranks() -> contextlib.AbstractContextManager[Any]:
    """A context in which arrays of different ranks broadcast: what
    `jax_numpy_rank_promotion` forbids users, this package's own operations may do."""
    return jax.numpy_rank_promotion("allow")


def checks_values() -> bool:
    """Whether `jax_debug_nans` or `jax_debug_infs` is on: JAX then runs a step that
    made such a value a second time, on the same arguments."""
    return bool(_config.debug_nans.value or _config.debug_infs.value)


def refuses_transfers() -> bool:
    """Whether `jax.transfer_guard` refuses to move arrays between devices unasked."""
    guard = getattr(jax.config, "jax_transfer_guard_device_to_device")  # noqa: B009
    return guard in ("disallow", "disallow_explicit")


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
