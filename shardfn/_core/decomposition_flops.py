"""FLOPs of matrix decompositions and triangular solves.

In: an equation. Out: what the usual algorithms take, to the leading order (Golub and
Van Loan, Matrix Computations, 4th edition, sections 3.2, 4.2, 5.2, 7.5, 8.3 and 8.6).
They are no part of a model's FLOPs, and run far below the rate of products.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

Count = Callable[[int, int, JaxprEqn], Fraction | int]
"""FLOPs on one real matrix of `m` rows and `n` columns, no fewer rows than columns."""


def decomposition_flops(eqn: JaxprEqn) -> int:
    """FLOPs of one equation on whole operands; zero for other operations."""
    count = _FLOPS.get(eqn.primitive.name)
    if count is None:
        return 0
    operand: Any = eqn.invars[0].aval
    *stack, rows, columns = operand.shape
    each = count(max(rows, columns), min(rows, columns), eqn)
    of_complex = 4 if np.issubdtype(operand.dtype, np.complexfloating) else 1
    return math.floor(of_complex * math.prod(stack) * each)


def _cholesky(m: int, n: int, eqn: JaxprEqn) -> Fraction:
    return Fraction(n**3, 3)


def _lu(m: int, n: int, eqn: JaxprEqn) -> Fraction:
    return m * n**2 - Fraction(n**3, 3)


def _reflections(m: int, n: int, eqn: JaxprEqn) -> Fraction:
    """Householder's, to find them or to multiply them out."""
    return 2 * _lu(m, n, eqn)


def _qr(m: int, n: int, eqn: JaxprEqn) -> Fraction:
    return 2 * _reflections(m, n, eqn)


def _svd(m: int, n: int, eqn: JaxprEqn) -> int:
    if not eqn.params.get("compute_uv", True):
        return 2 * m * n**2 + 2 * n**3
    if eqn.params.get("full_matrices", False):
        return 4 * m**2 * n + 22 * n**3
    return 6 * m * n**2 + 20 * n**3


def _eigh(m: int, n: int, eqn: JaxprEqn) -> int:
    return 9 * n**3


def _eig(m: int, n: int, eqn: JaxprEqn) -> int:
    return 25 * n**3


def _triangular_solve(m: int, n: int, eqn: JaxprEqn) -> int:
    solved: Any = eqn.invars[1].aval
    return n * math.prod(solved.shape[-2:])


_FLOPS: dict[str, Count] = {
    "cholesky": _cholesky,
    "lu": _lu,
    "geqrf": _reflections,
    "geqp3": _reflections,
    "householder_product": _reflections,
    "qr": _qr,
    "svd": _svd,
    "eigh": _eigh,
    "eig": _eig,
    "schur": _eig,
    "triangular_solve": _triangular_solve,
}
