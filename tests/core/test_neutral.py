"""Values that do not count in a reduction."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from shardfn._core.neutral import neutral

FLOATS = [jnp.float32, jnp.bfloat16] + [
    getattr(ml_dtypes, f"float8_{form}")
    for form in ("e3m4", "e4m3fn", "e4m3fnuz", "e4m3b11fnuz", "e5m2", "e5m2fnuz")
]
OTHERS = [jnp.int4, jnp.uint4, jnp.int8, jnp.uint8, jnp.int32, jnp.bool_]


@pytest.mark.parametrize("dtype", [*FLOATS, *OTHERS], ids=lambda x: np.dtype(x).name)
def test_what_is_neutral_changes_no_value(dtype) -> None:
    info = None if dtype == jnp.bool_ else jnp.iinfo if dtype in OTHERS else jnp.finfo
    ends = (0, 1) if info is None else (info(dtype).min, 1, info(dtype).max)
    values = np.asarray(ends).astype(dtype)
    for reducer, combine in {
        **{"max": np.maximum, "min": np.minimum, "sum": np.add, "prod": np.multiply},
        **({"and": np.bitwise_and, "or": np.bitwise_or} if dtype in OTHERS else {}),
    }.items():
        first = np.asarray(neutral(reducer, dtype))
        assert first.dtype == np.dtype(dtype)
        if dtype in OTHERS:  # of which NumPy does not combine those of four bits
            first, given = (x.astype(np.int64) for x in (first, values))
        else:
            given = values
        assert (combine(first, given) == given).all(), (reducer, first)
