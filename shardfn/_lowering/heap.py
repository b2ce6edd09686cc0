"""How a compiler uses a device's memory, where platforms differ.

In: the devices, and the options that a step is compiled with. Out: `Heap`, which the
plan's estimate of memory reads.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from shardfn._core.limits import TPU_HEAP_HOLES
from shardfn._lowering.option_table import NOT_DELAYED, TRIED
from shardfn._lowering.xla_options import device_and_platform
from shardfn._schedule.heap import Heap


def heap_of(devices: Sequence[Any], options: Mapping[str, Any]) -> Heap:
    """The heap of a step on these devices.

    Args:
      devices: those of the mesh; they may be devices that are not there.
      options: the compiler's options.

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
    asked = any(options.get(name) == value for name, value in spellings)
    return Heap(delays_sums=platform == "gpu" and not asked)
