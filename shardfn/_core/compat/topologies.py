"""Devices that are only compiled for, and do not say what memories they have.

In: avals of arguments on a mesh of such devices, and what is traced on them. Out: the
same on no devices, and a lowered program for them. JAX drops the memory of a sharding
on devices that know of none (GPUs of a topology), so that what should come from the
host would come from the device; on a mesh without devices it stays.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
from jax._src import xla_bridge as _xla_bridge
from jax._src.cudnn import fused_attention_stablehlo as _fused_attention
from jax._src.interpreters import pxla as _pxla
from jax.sharding import Mesh, NamedSharding

from shardfn._core.compat.platforms import lowered_for

CUDNN = (9, 13, 0)
"""The cuDNN of GPUs that are not there: 9.13, which has all that JAX 0.10 to 0.12 ask
for. That of a machine may be older."""

_on_gpus = ContextVar("_on_gpus", default=False)


@contextlib.contextmanager
def with_cudnn(mesh: jax.sharding.AbstractMesh | None) -> Iterator[None]:
    """Lets code that calls cuDNN be traced for the GPUs of a mesh where there is none:
    JAX looks for it, and for a GPU, while it traces."""
    device = None if mesh is None else mesh.abstract_device
    token = _on_gpus.set(device is not None and device.platform == "gpu")
    try:
        yield
    finally:
        _on_gpus.reset(token)


def _version_or_assumed(own: Callable[[], int]) -> Callable[[], int]:
    def version() -> int:
        try:
            return own()
        except RuntimeError:  # none on this machine
            if not _on_gpus.get():
                raise
            major, minor, patch = CUDNN
            return (major * 100 + minor) * 100 + patch

    return version


def _capable_or_assumed(own: Callable[[str], bool]) -> Callable[[str], bool]:
    """A GPU of this process is asked; those that are not there are taken for Hopper's
    or later: what older ones refuse, they refuse when the step is run."""

    def is_capable(capability: str) -> bool:
        if _on_gpus.get() and not _is_there("gpu"):
            return True
        return own(capability)

    return is_capable


def _is_there(platform: str) -> bool:
    """Whether this process has devices of a platform."""
    return any(c.platform == platform for c in _xla_bridge.backends().values())


_fused_attention.check_cudnn_version = _version_or_assumed(
    _fused_attention.check_cudnn_version
)
_fused_attention.check_compute_capability = _capable_or_assumed(
    _fused_attention.check_compute_capability
)


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


def device_known(mesh: Mesh) -> Any:
    """A context in which what is lowered knows the device that it is lowered for, where
    this process has none such: Pallas asks which GPU it is."""
    device = mesh.abstract_mesh.abstract_device
    alone = jax.sharding.AbstractMesh((), (), abstract_device=device)
    described = are_described(mesh)
    return (
        jax.sharding.use_abstract_mesh(alone) if described else contextlib.nullcontext()
    )


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
    platform = lowered_for(devices[0].platform, devices[0].client)
    lowered = traced.lower(lowering_platforms=(platform,))
    computation = lowered._lowering
    computation.compile_args["backend"] = devices[0].client
    computation._device_list = _pxla._create_device_list(devices)
    return lowered
