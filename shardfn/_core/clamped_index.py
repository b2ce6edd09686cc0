"""Where JAX moves a window that would begin outside of an array.

In: an index and the last place where the window still lies inside. Out: the place where
it begins.
"""

import jax
import jax.numpy as jnp
from jax import lax


def clamped(index: jax.Array, limit: int) -> jax.Array:
    """An index as JAX moves it, between 0 and `limit`, as int32.

    It is compared in its own dtype: one of uint32 or int64 may be none of int32, and
    `limit` none of a narrow dtype.
    """
    bound = min(limit, int(jnp.iinfo(index.dtype).max))
    zero, bound = (jnp.asarray(n, index.dtype) for n in (0, bound))
    return lax.clamp(zero, index, bound).astype(jnp.int32)
