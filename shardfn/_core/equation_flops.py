"""FLOPs of one matrix product or convolution.

In: an equation. Out: two FLOPs per multiply-add, by the dtype of the operands.
"""

import math
from collections import Counter
from typing import Any

from jax.extend.core import JaxprEqn


def flops_of(eqn: JaxprEqn) -> Counter[str]:
    """FLOPs of one equation on whole operands, by their dtype."""
    name = eqn.primitive.name
    if name not in ("dot_general", "conv_general_dilated"):
        return Counter()
    avals: list[Any] = [v.aval for v in eqn.invars]
    lhs, rhs = avals[:2]
    out: Any = eqn.outvars[0].aval
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        pairs = math.prod(lhs.shape[d] for d in contracted)
    else:
        features = eqn.params["dimension_numbers"].rhs_spec[0]
        pairs = math.prod(rhs.shape) // max(rhs.shape[features], 1)
    return Counter({str(lhs.dtype): 2 * math.prod(out.shape) * pairs})
