"""What a call must look like to run a compiled step at once, without looking closer.

In: the leaves of a call. Out: the leaves to run on, or None: then the long way finds
out what they are, places them, or says what is wrong with them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from shardfn._core import compat
from shardfn.storage._padding import logical_shape

SCALARS = (bool, int, float, complex)
"""Python types that JAX takes for scalars."""


def types_of(batch: Sequence[Any]) -> tuple[Any, ...] | None:
    """The types that JAX takes the leaves of a batch for, or None if one has none that
    can be told at once."""
    found: list[Any] = []
    for x in batch:
        if type(x) in compat.CONCRETE_ARRAYS:
            found.append((x.shape, x.dtype))
        elif isinstance(x, np.ndarray | np.generic):
            found.append((x.shape, jax.dtypes.canonicalize_dtype(x.dtype)))
        elif type(x) in SCALARS:
            found.append(type(x))
        else:
            return None
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Ready:
    """A call that has gone the long way once.

    Attributes:
      run: the jitted step.
      shapes: stored shapes of the state's leaves.
      logical: their logical shapes.
      shardings: their shardings.
      padded: positions and logical shapes of the leaves that are to carry them.
      batch_shardings: where the batch's leaves belong; None for scalars, which stay
        where they are.
    """

    run: Any
    shapes: tuple[tuple[int, ...], ...]
    logical: tuple[tuple[int, ...], ...]
    shardings: tuple[Any, ...]
    padded: tuple[tuple[int, tuple[int, ...]], ...]
    batch_shardings: tuple[Any, ...]

    def takes(self, state: Sequence[Any]) -> bool:
        """Whether the state's leaves are stored as the step wants them, and alive."""
        arrays = compat.CONCRETE_ARRAYS
        for x, shape, logical, sharding in zip(
            state, self.shapes, self.logical, self.shardings, strict=True
        ):
            if type(x) not in arrays or x.shape != shape or x.is_deleted():
                return False
            if x.sharding != sharding or (logical_shape(x) or shape) != logical:
                return False
        return True

    def place(self, batch: Sequence[Any]) -> list[Any]:
        """The batch's leaves, of the types of that call, on the mesh."""
        placed = []
        for x, sharding in zip(batch, self.batch_shardings, strict=True):
            if sharding is None or getattr(x, "sharding", None) == sharding:
                placed.append(x)
            else:
                placed.append(jax.device_put(x, sharding))
        return placed
