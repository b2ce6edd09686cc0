"""The rule of an op that selects some of the elements of an array.

In: the equation, its factors, and those along which it selects. Out: its rule: a small
selection is a sum of what each device has of it, of a large one all is gathered.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from shardfn._core.limits import FEW_SELECTED
from shardfn._core.make_rule import make_rule
from shardfn._core.op_sharding_rule import OpShardingRule
from shardfn.rules._factors import (
    dtype_of,
    result_shape,
    shape_of,
)

FEW = (
    f"it selects at most {FEW_SELECTED} of the elements, so terms of these are reduced "
    "in place of a gather of all (limits.FEW_SELECTED)"
)


MANY = (
    f"it selects more than {FEW_SELECTED} of the elements, so all are gathered "
    "(limits.FEW_SELECTED)"
)


def selection_rule(
    eqn: JaxprEqn,
    operands: Iterable[Sequence[str]],
    result: Sequence[str],
    *,
    selected: Collection[str],
    whole: Iterable[str] = (),
    linear: Any = "",
) -> OpShardingRule:
    """The rule of an op that selects along the factors `selected` of its first operand.

    If it selects little, each device gives what it holds, else zeros: the sum of these
    terms moves no more than a gather of what is selected from. If not, the factors stay
    whole.
    """
    reducer = _reducer_of(dtype_of(eqn))
    few = math.prod(result_shape(eqn)) <= FEW_SELECTED * math.prod(shape_of(eqn))
    threshold = "" if reducer is None else FEW if few else MANY
    rule = make_rule(
        eqn,
        operands,
        [result],
        reduce=dict.fromkeys(selected, reducer) if reducer and few else {},
        whole={*whole, *(() if reducer and few else selected)},
        linear=linear,
        picks=bool(reducer and few),
    )
    return replace(rule, threshold=threshold)


def _reducer_of(dtype: Any) -> str | None:
    """What makes one value of terms of which all but one are zero; None if nothing."""
    if not isinstance(dtype, np.dtype):
        return None
    if dtype == np.dtype(bool):
        return "or"
    # The small types that ml_dtypes adds have no sums on the wire.
    return "sum" if dtype.kind in "iufc" or dtype == jnp.bfloat16 else None
