"""What a call must look like to run a compiled step at once, without looking closer.

In: the leaves of a call. Out: the leaves to run on, or None: then the long way finds
out what they are, places them, or says what is wrong with them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from shardfn import _compat
from shardfn._padding import logical_shape


@dataclass(frozen=True, slots=True)
class Ready:
    """A call that has gone the long way once.

    Attributes:
      run: the jitted step.
      shapes: stored shapes of the state's leaves.
      shardings: their shardings.
      padded: `(position, logical shape)` of leaves stored in another shape.
      batch_types: shapes and dtypes of the batch's leaves.
      batch_shardings: where they belong; None for scalars, which stay where they are.
    """

    run: Any
    shapes: tuple[tuple[int, ...], ...]
    shardings: tuple[Any, ...]
    padded: tuple[tuple[int, tuple[int, ...]], ...]
    batch_types: tuple[tuple[tuple[int, ...], Any], ...]
    batch_shardings: tuple[Any, ...]

    def takes(self, state: Sequence[Any]) -> bool:
        """Whether the state's leaves are stored as the step wants them, and alive."""
        arrays = _compat.CONCRETE_ARRAYS
        for x, shape, sharding in zip(state, self.shapes, self.shardings, strict=True):
            if type(x) not in arrays or x.shape != shape or x.is_deleted():
                return False
            if x.sharding != sharding:
                return False
        return all(logical_shape(state[i]) == shape for i, shape in self.padded)

    def place(self, batch: Sequence[Any]) -> list[Any] | None:
        """The batch's leaves on the mesh, or None if their types are others."""
        placed = []
        accepted = (*_compat.CONCRETE_ARRAYS, np.ndarray)
        for x, known, sharding in zip(
            batch, self.batch_types, self.batch_shardings, strict=True
        ):
            if type(x) not in accepted or (x.shape, x.dtype) != known:
                return None
            if sharding is None or getattr(x, "sharding", None) == sharding:
                placed.append(x)
            else:
                placed.append(jax.device_put(x, sharding))
        return placed
