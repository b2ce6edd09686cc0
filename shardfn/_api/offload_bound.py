"""How much of a device a step may take, where that decides what lives on the host.

In: what was asked of leaves, and the mesh. Out: bytes; or an error where no number is
given and devices do not say one that is the same everywhere.
"""

import jax

from shardfn._core import processes
from shardfn._core.errors import ShardingError, called
from shardfn._core.memories import HOST
from shardfn._core.option_values import AUTO, size_in
from shardfn.storage._placement import Storage


def offload_bound(storage: Storage, memory: int | None) -> tuple[str, int]:
    """What was asked, as the user wrote it, and the bytes that this comes to.

    Args:
      storage: how the state is stored.
      memory: bytes of a device, for "auto"; None if the devices are to say.

    Returns:
      What was asked, and the bound in bytes.
    """
    asked = dict.fromkeys(storage.control.asked("offload"))
    bounds = [each for each in asked if each not in (None, HOST)]
    if len(bounds) > 1:
        raise ShardingError(
            f"offload asks for different bounds, {' and '.join(map(repr, bounds))}: a "
            f"device has one memory.\n{called()}"
            "Give all patterns the same bound, None or 'host'."
        )
    (bound,) = bounds
    size = memory if bound == AUTO else size_in(bound)
    return bound, _memory_of(storage) if size is None else size


def _memory_of(storage: Storage) -> int:
    """The bytes that the devices of a mesh say they have for JAX."""
    device = storage.given.devices.flat[0]
    stats = None
    if len(processes.of(storage.given.devices.flat)) == 1:
        try:
            stats = device.memory_stats()
        except jax.errors.JaxRuntimeError:  # it is only described
            stats = None
    if not stats or "bytes_limit" not in stats:
        raise ShardingError(
            "offload='auto' has to know how much memory a device has, and "
            f"{device.device_kind} devices of this mesh do not say it, or not the same "
            f"to all processes.\n{called()}"
            "Give a bound, as in offload='70GiB', or ask step.on(target, state, batch)."
        )
    return stats["bytes_limit"]
