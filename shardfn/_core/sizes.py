"""Elements and bytes of a value.

In: an aval. Out: counts that also hold for values without shape or dtype.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from shardfn._core.sharding import Axes, Sharding, local_shape


def elements(aval: Any) -> int:
    """Elements of a value; 1 for what has no shape."""
    return math.prod(getattr(aval, "shape", ()))


def nbytes(aval: Any) -> int:
    """Bytes of a whole value."""
    return elements(aval) * itemsize(aval)


def local_bytes(aval: Any, sharding: Sharding, axes: Axes) -> int:
    """Bytes of a value on one device, padding included."""
    shape = local_shape(getattr(aval, "shape", ()), sharding, axes)
    return math.prod(shape) * itemsize(aval)


def bytes_in(size: int, aval: Any, dtype: Any) -> int:
    """Bytes in another dtype of elements of a value that take `size` in its own."""
    return size // itemsize(aval) * np.dtype(dtype).itemsize


def signs_in_byte(shape: Sequence[int]) -> int:
    """How many truth values libtpu keeps in a byte: those along the first dimension of
    an array of three or more, as long as there are bits."""
    return min(8, shape[0]) if len(shape) > 2 else 1


def is_key_name(dtype: str) -> bool:
    """Whether this is the name of a dtype of PRNG keys."""
    return dtype.startswith("key<")


def key_word() -> int:
    """Bytes of one of the words that a PRNG key is made of."""
    return np.dtype(np.uint32).itemsize


def itemsize(aval: Any) -> int:
    """Bytes per element; 8 for PRNG keys."""
    return getattr(getattr(aval, "dtype", None), "itemsize", None) or 8


def keeps_numbers(old: Any, new: Any) -> bool:
    """Whether every number of a floating-point dtype has an equal in another one."""
    if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in (old, new)):
        return False
    a, b = jnp.finfo(old), jnp.finfo(new)
    return a.nmant <= b.nmant and a.maxexp <= b.maxexp and a.minexp >= b.minexp
