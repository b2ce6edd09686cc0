"""Meshes with explicit axes, which are part of types.

In: arrays and meshes. Out: the same without such types, and why JAX refused a mesh.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax._src import config as _config
from jax.sharding import AxisType, Mesh, NamedSharding

from shardfn._core.compat.arrays import is_traced
from shardfn._core.compat.settings import at_top_level


def mesh_lacking(error: ValueError, is_set: Any, given: Any) -> Any | None:
    """The mesh with explicit axes without which an operation failed that names its
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


@contextlib.contextmanager
def without_mesh() -> Iterator[None]:
    """Traces as at the top level, where no mesh is set."""
    with (
        at_top_level(),
        jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())),
    ):
        yield
