"""On which mesh an array lies, and where operations on it may run.

In: meshes with explicit or automatic axes, arrays. Out: the mesh to place arrays on,
and contexts in which JAX takes them.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)

from shardfn._core import compat
from shardfn._core.memories import DEVICE, is_on_host, space_of


def automatic(mesh: Mesh) -> Mesh:
    """The same devices and axes, every axis left to the compiler."""
    types = (AxisType.Auto,) * len(mesh.axis_names)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=types)


def current_mesh(mesh: Mesh, given: Mesh) -> Mesh:
    """The mesh to place arrays on: the caller's mesh `given` inside `jax.set_mesh` of
    it, else the automatic one, `mesh`.

    Operations take no arrays of another mesh than the one that is set. Where none is
    set, JAX takes no gradients of arrays that are typed by one.
    """
    is_set = jax.sharding.get_abstract_mesh() == given.abstract_mesh
    return given if is_set else mesh


def is_placed_on(mesh: Mesh, x: Any) -> bool:
    """Whether `x` is an array with values that is placed on the mesh."""
    is_concrete = type(x) in compat.CONCRETE_ARRAYS
    return is_concrete and getattr(x.sharding, "mesh", None) == mesh


def only(sharding: SingleDeviceSharding) -> Mesh:
    """The mesh of one device."""
    (device,) = sharding.device_set
    return Mesh([device], ("_",), axis_types=(AxisType.Auto,))


def on_mesh_of(x: Any) -> contextlib.AbstractContextManager[Any]:
    """A context for operations on an array where it lies, if another mesh is set."""
    if compat.is_tracing() or jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    match getattr(x, "sharding", None):
        case NamedSharding(mesh=Mesh() as mesh):
            return jax.set_mesh(mesh)
        case SingleDeviceSharding() as one:
            return jax.set_mesh(only(one))
    return contextlib.nullcontext()


def on_each(x: Any) -> Any:
    """An array of a mesh, whole on every device: that on the first one of this process.
    Others stay as they are.

    It waits until it is there: devices hold one whole array at a time, and gathers that
    several processes begin ahead of each other can wait for each other for ever.
    """
    if not isinstance(x, jax.Array) or not isinstance(x.sharding, NamedSharding):
        return x
    assert isinstance(x.sharding.mesh, Mesh)
    whole = jax.block_until_ready(_replicated(x.sharding.mesh)(x))
    return whole.addressable_data(0)


@functools.lru_cache(maxsize=64)
def _replicated(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))


def moved(x: Any, device: SingleDeviceSharding) -> Any:
    """`x` on one device, in a buffer of its own: that of `x` may be donated."""
    shares = isinstance(x, compat.CONCRETE_ARRAYS) and x.is_fully_replicated
    with jax.transfer_guard("allow"):  # the caller asked for it; some go by the host
        if shares and is_on_host(x):  # JAX would take the device's buffer as it is
            with on_mesh_of(x):
                x = jax.device_put(x, space_of(DEVICE))
        moved = jax.device_put(x, device)
    return jnp.copy(moved) if shares else moved
