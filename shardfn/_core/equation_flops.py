"""FLOPs of one matrix product, of ragged groups too, convolution, or attention.

In: an equation. Out: two FLOPs per multiply-add, by the dtype of the operands.
"""

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from jax.extend.core import JaxprEqn

from shardfn._core import compat


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


def attention_multiply_adds(
    queries: int,
    keys: int,
    widths: tuple[int, int],
    *,
    causal: bool,
    window: int,
    backward: bool,
) -> int:
    """Multiply-adds of one head's attention in a kernel that makes no scores that do
    not count.

    Args:
      queries: how many positions attend.
      keys: how many they attend to.
      widths: numbers of a key and of a value.
      causal: whether a position attends to those up to its own alone.
      window: to how many of these; 0 for all.
      backward: whether the gradients of all three are made, of scores made anew.

    Returns:
      The number.
    """
    ends = range(1, queries + 1)
    seen = (min(t, keys) - max(t - (window or t), 0) for t in ends)
    scores = sum(max(n, 0) for n in seen) if causal or window else queries * keys
    of_keys, of_values = (3, 2) if backward else (1, 1)
    return scores * (of_keys * widths[0] + of_values * widths[1])


def _of_attention(eqn: JaxprEqn, backward: bool = False) -> int:
    heads_first = compat.attention_heads_first(eqn)
    query, key, value = (v.aval.shape for v in eqn.invars[:3])  # pyright: ignore
    heads, positions = (1, 2) if heads_first else (2, 1)
    return (
        query[0]
        * query[heads]
        * attention_multiply_adds(
            query[positions],
            key[positions],
            (query[-1], value[-1]),
            causal=compat.attention_is_causal(eqn),
            window=eqn.params["sliding_window_length"] or 0,
            backward=backward,
        )
    )


def _shapes(eqn: JaxprEqn) -> tuple[tuple[int, ...], ...]:
    """Of both operands and the result."""
    avals: list[Any] = [v.aval for v in (*eqn.invars[:2], eqn.outvars[0])]
    return tuple(aval.shape for aval in avals)


_MULTIPLY_ADDS: dict[str, Callable[[JaxprEqn], int]] = {
    "dot_general": _of_product,
    "ragged_dot_general": _of_ragged_product,
    "conv_general_dilated": _of_convolution,
    "dot_product_attention_fwd_wrapper": _of_attention,
    "dot_product_attention_bwd_wrapper": partial(_of_attention, backward=True),
}
