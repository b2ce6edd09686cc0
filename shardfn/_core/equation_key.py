"""What an equation does, as a value.

In: an equation and its operands. Out: `looks`, equal for equations that do the same to
operands of the same types, and so have one rule.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Literal


def looks_of(
    eqn: JaxprEqn, operands: Sequence[int | Literal]
) -> tuple[tuple[Any, ...], bool]:
    """The looks of an equation whose operands are values or literals, and whether they
    can be compared with others."""
    looks = (
        eqn.primitive,
        tuple(v.aval for v in eqn.invars),
        tuple(None if isinstance(a, int) else literal_looks(a) for a in operands),
        tuple(sorted(eqn.params.items())),
        tuple(v.aval for v in eqn.outvars),
    )
    try:
        hash(looks)
    except TypeError:
        return looks, False
    return looks, True


def literal_looks(literal: Literal) -> Hashable:
    """The type and value of a literal."""
    return literal.aval, type(literal.val), np.asarray(literal.val).tobytes()
