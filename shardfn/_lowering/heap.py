"""How a compiler uses a device's memory, where platforms differ.

In: the devices, and what the user asks of their compiler. Out: `Heap`, which the
plan's estimate of memory reads.
"""

from collections.abc import Sequence
from typing import Any

from shardfn._core.limits import TPU_HEAP_HOLES
from shardfn._lowering.option_table import NOT_DELAYED, TRIED
from shardfn._lowering.xla_options import Asked, device_and_platform
from shardfn._schedule.heap import Heap


def heap_of(devices: Sequence[Any], asked: Asked = None) -> Heap:
    """The heap of a step on these devices.

    Args:
      devices: those of the mesh; they may be devices that are not there.
      asked: what the user asks of the compiler; see `fully_shard`.

    Returns:
      What is known of it.
    """
    _, platform = device_and_platform(devices)
    if platform == "tpu":
        return Heap(
            casts_stacks=True,
            compares=True,
            inlines=True,
            packs_masks=True,
            pads_gathers=True,
            holes=TPU_HEAP_HOLES,
        )
    spellings = (pair for option in TRIED[NOT_DELAYED] for pair in option.spellings)
    waits = any((asked or {}).get(name) == value for name, value in spellings)
    return Heap(delays_sums=platform == "gpu" and not waits)
