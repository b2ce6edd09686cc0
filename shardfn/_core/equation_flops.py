"""FLOPs of one matrix product, of ragged groups too, or convolution.

In: an equation. Out: two FLOPs per multiply-add, by the dtype of the operands.
"""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from jax.extend.core import JaxprEqn


def flops_of(eqn: JaxprEqn) -> Counter[str]:
    """FLOPs of one equation on whole operands, by their dtype."""
    multiply_adds = _MULTIPLY_ADDS.get(eqn.primitive.name)
    if multiply_adds is None:
        return Counter()
    operand: Any = eqn.invars[0].aval
    return Counter({str(operand.dtype): 2 * multiply_adds(eqn)})


def _of_product(eqn: JaxprEqn) -> int:
    lhs, _, out = _shapes(eqn)
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return math.prod(out) * math.prod(lhs[d] for d in contracted)


def _of_ragged_product(eqn: JaxprEqn) -> int:
    """Each row meets the weights of its own group, not those of all."""
    lhs, rhs, _ = _shapes(eqn)
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    met = {*contracted, *batch, *numbers.rhs_group_dimensions}
    return math.prod(lhs) * math.prod(n for d, n in enumerate(rhs) if d not in met)


def _of_convolution(eqn: JaxprEqn) -> int:
    _, rhs, out = _shapes(eqn)
    features = eqn.params["dimension_numbers"].rhs_spec[0]
    return math.prod(out) * (math.prod(rhs) // max(rhs[features], 1))


def _shapes(eqn: JaxprEqn) -> tuple[tuple[int, ...], ...]:
    """Of both operands and the result."""
    avals: list[Any] = [v.aval for v in (*eqn.invars[:2], eqn.outvars[0])]
    return tuple(aval.shape for aval in avals)


_MULTIPLY_ADDS: dict[str, Callable[[JaxprEqn], int]] = {
    "dot_general": _of_product,
    "ragged_dot_general": _of_ragged_product,
    "conv_general_dilated": _of_convolution,
}
