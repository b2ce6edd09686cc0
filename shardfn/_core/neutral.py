"""Values that do not count in a reduction.

In: a reducer and a dtype. Out: the scalar that leaves the reduction unchanged.
"""

from typing import Any

import jax
import jax.numpy as jnp


def neutral(reducer: str, dtype: Any) -> jax.Array:
    """The value that leaves a reduction unchanged."""
    if reducer in ("max", "min"):
        floats = jnp.issubdtype(dtype, jnp.floating)
        if floats:
            return jnp.asarray(-jnp.inf if reducer == "max" else jnp.inf, dtype)
        info = jnp.iinfo(dtype) if dtype != jnp.bool_ else None
        low, high = (info.min, info.max) if info else (False, True)
        return jnp.asarray(low if reducer == "max" else high, dtype)
    return jnp.asarray({"sum": 0, "prod": 1, "and": -1, "or": 0}[reducer]).astype(dtype)
