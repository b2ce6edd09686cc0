"""What an equation does, as a value.

In: an equation and its operands. Out: its key, equal for equations that do the same to
operands of the same types, and so have one rule.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Literal


def equation_key(
    eqn: JaxprEqn, operands: Sequence[int | Literal]
) -> tuple[tuple[Any, ...], bool]:
    """The key of an equation whose operands are values or literals, and whether it can
    be compared with others."""
    eqn_key = (
        eqn.primitive,
        tuple(v.aval for v in eqn.invars),
        tuple(None if isinstance(a, int) else literal_key(a) for a in operands),
        tuple(sorted(eqn.params.items())),
        tuple(v.aval for v in eqn.outvars),
    )
    try:
        hash(eqn_key)
    except TypeError:
        return eqn_key, False
    return eqn_key, True


def literal_key(literal: Literal) -> Hashable:
    """The type and value of a literal."""
    return literal.aval, type(literal.val), np.asarray(literal.val).tobytes()
