"""What the temporary arrays of a compiled program take of a device.

In: a lowered program. Out: the compiled one, and the bytes of its heap.

libtpu's summary of a program (`temp_size_in_bytes`) is not that. It adds to the heap
the holes in it once more, and takes what loops carry for holes: 6.34 GiB for a heap of
4.55. The heap itself is an allocation of the buffer assignment, which XLA writes on
request. By that, too, libtpu decides whether a program fits.
"""

import re
import tempfile
from pathlib import Path
from typing import Any

import jax

_ASSIGNMENT = "*after_optimizations-buffer-assignment.txt"
_HEAP = re.compile(
    r"^allocation \d+: size (\d+)(?:, page 0)?, preallocated-temp:", re.MULTILINE
)
"""An allocation in the device's main memory: others have a color, or another page."""


def compiled_with_heap(
    lowered: jax.stages.Lowered, platform: str, options: dict[str, Any] | None = None
) -> tuple[jax.stages.Compiled, int]:
    """Compiles a program and reads the size of its heap.

    Args:
      lowered: the program.
      platform: of the devices that it is for.
      options: the compiler's options, beside those that it was lowered with.

    Returns:
      The compiled program and the bytes: by the compiler's summary, but for TPUs, and
      for them too if the compiler writes no buffer assignment.
    """
    if platform != "tpu":
        compiled = lowered.compile(compiler_options=options)
        return compiled, _summed(compiled)
    with tempfile.TemporaryDirectory() as folder:
        asked = {**(options or {}), "xla_dump_to": folder}
        compiled = lowered.compile(compiler_options=asked)
        written = [path.read_text() for path in Path(folder).glob(_ASSIGNMENT)]
    heap = max(map(heap_size, written), default=0)
    return compiled, heap or _summed(compiled)


def heap_size(assignment: str) -> int:
    """Bytes of the heap of a buffer assignment, as XLA writes it."""
    return sum(map(int, _HEAP.findall(assignment)))


def _summed(compiled: jax.stages.Compiled) -> int:
    summary: Any = compiled.memory_analysis()
    return summary.temp_size_in_bytes
