"""Where accelerators are on their links.

In: devices, there or not. Out: their coordinates, and how many slices they belong to.
"""

from collections.abc import Iterable
from typing import Any

from shardfn._core import processes


def coords_of(device: Any) -> tuple[int, ...]:
    """Where a device is: on the torus; or a GPU's slice, which is what NVLink connects,
    its host and number there, of which the process tells where the runtime does not."""
    found = getattr(device, "coords", None)
    if found is not None:
        return tuple(found)
    [process] = processes.of([device])
    return getattr(device, "slice_index", None) or 0, process, device.id


def slices_of(gpus: Iterable[Any]) -> int:
    """How many slices some GPUs belong to, whatever process runs them."""
    return len({coords_of(gpu)[0] for gpu in gpus})
