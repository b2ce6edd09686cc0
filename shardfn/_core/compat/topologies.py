"""Devices that are only compiled for, and do not say what memories they have.

In: avals of arguments on a mesh of such devices, and what is traced on them. Out: the
same on no devices, and a lowered program for them. JAX drops the memory of a sharding
on devices that know of none (GPUs of a topology), so that what should come from the
host would come from the device; on a mesh without devices it stays.
"""

from typing import Any

import jax
from jax._src import xla_bridge as _xla_bridge
from jax._src.interpreters import pxla as _pxla
from jax.sharding import Mesh, NamedSharding

PLATFORMS = {"gpu": "cuda"}
"""What devices call their platform, where lowering has another name for it."""


def lacks_memories(mesh: Mesh) -> bool:
    """Whether the devices of a mesh do not say what memories they have."""
    try:
        mesh.devices.flat[0].default_memory()
    except jax.errors.JaxRuntimeError:
        return True
    return False


def are_described(mesh: Mesh) -> bool:
    """Whether the devices of a mesh are not this process's, nor those of others that it
    runs with: programs can be compiled for them alone."""
    return mesh.devices.flat[0].client not in _xla_bridge.backends().values()


def without_devices(
    aval: jax.ShapeDtypeStruct, memory_kind: str | None
) -> jax.ShapeDtypeStruct:
    """An argument on the same mesh without devices, in a memory."""
    named = aval.sharding
    assert isinstance(named, NamedSharding) and isinstance(named.mesh, Mesh)
    return jax.ShapeDtypeStruct(
        aval.shape,
        aval.dtype,
        weak_type=aval.weak_type,
        sharding=NamedSharding(
            named.mesh.abstract_mesh, named.spec, memory_kind=memory_kind
        ),
    )


def lower_on(traced: Any, mesh: Mesh) -> jax.stages.Lowered:
    """Lowers what is traced on no devices, to be compiled for those of a mesh."""
    devices = tuple(mesh.devices.flat)
    platform = devices[0].platform
    lowered = traced.lower(lowering_platforms=(PLATFORMS.get(platform, platform),))
    computation = lowered._lowering
    computation.compile_args["backend"] = devices[0].client
    computation._device_list = _pxla._create_device_list(devices)
    return lowered
