"""Values that do not count in a reduction.

In: a reducer and a dtype. Out: the scalar that leaves the reduction unchanged.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def neutral(reducer: str, dtype: Any) -> jax.Array:
    """The value that leaves a reduction unchanged; complex numbers have no extrema that
    blocks can be combined by."""
    if reducer in ("max", "min"):
        low, high = _ends(dtype)
        return jnp.asarray(low if reducer == "max" else high, dtype)
    return jnp.asarray({"sum": 0, "prod": 1, "and": -1, "or": 0}[reducer]).astype(dtype)


def _ends(dtype: Any) -> tuple[Any, Any]:
    """The least and the greatest value of a dtype: some floats, such as float8_e4m3fn,
    have no infinity, and make NaN of it."""
    if dtype == jnp.bool_:
        return False, True
    is_float = jnp.issubdtype(dtype, jnp.floating)
    if is_float and np.isinf(np.asarray(-np.inf).astype(dtype)):
        return -np.inf, np.inf
    info = jnp.finfo(dtype) if is_float else jnp.iinfo(dtype)
    return info.min, info.max
