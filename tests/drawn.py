"""In: a key and shapes. Out: random arrays, cut from one draw: XLA takes half a second
to compile each draw."""

import math
from collections.abc import Mapping

import jax
import numpy as np


def arrays(
    key: jax.Array, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, jax.Array]:
    """Normal float32 numbers, other ones in each array."""
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])
    drawn = jax.random.normal(key, (int(ends[-1]),))
    starts = ends - [math.prod(shape) for shape in shapes.values()]
    return {
        name: jax.lax.slice(drawn, [start], [end]).reshape(shape)
        for (name, shape), start, end in zip(shapes.items(), starts, ends, strict=True)
    }
