"""How a compiler uses a device's memory, where platforms differ.

In: the devices, and the options that a step is compiled with. Out: `Heap`, which the
plan's estimate of memory reads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardfn._core.limits import TPU_HEAP_HOLES
from shardfn._lowering.xla_options import NOT_DELAYED, TRIED, device_and_platform


@dataclass(frozen=True, slots=True)
class Heap:
    """What a compiler does with memory.

    Attributes:
      delays_sums: whether the sums of a loop wait for an iteration, see `delayed_sums`.
      holes: what its heap takes beyond what lives at once, as a part of that.
    """

    delays_sums: bool = False
    holes: float = 0


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
        return Heap(holes=TPU_HEAP_HOLES)
    spellings = (pair for option in TRIED[NOT_DELAYED] for pair in option.spellings)
    asked = any(options.get(name) == value for name, value in spellings)
    return Heap(delays_sums=platform == "gpu" and not asked)
