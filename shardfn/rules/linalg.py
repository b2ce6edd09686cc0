"""Rules of matrix decompositions, solves and Fourier transforms.

In: an equation over stacks of matrices. Out: the leading dimensions mapped, the matrix
dimensions whole, except columns that are solved for one by one.
"""

from collections.abc import Sequence

from jax.extend.core import JaxprEqn

from shardfn._core.compat import primitives
from shardfn._core.make_rule import make_rule
from shardfn._core.op_sharding_rule import OpShardingRule
from shardfn._core.rule_registry import register_rule
from shardfn.rules._factors import (
    fresh_names,
    operand_shapes,
    result_shapes,
    shape_of,
    take,
)
from shardfn.rules.slicing import partly_changed

_OF_A_MATRIX = (
    "cholesky eig eigh geqp3 geqrf hessenberg householder_product lu qr schur svd "
    "symmetric_product tridiagonal"
)


@register_rule(*primitives(*_OF_A_MATRIX.split()))
def _of_matrices(eqn: JaxprEqn) -> OpShardingRule:
    """`a b c -> a d e, a f  whole={b, c, d, e, f}`."""
    return _stacked(eqn, len(shape_of(eqn)) - 2)


@register_rule(*primitives("lu_pivots_to_permutation"))
def _of_vectors(eqn: JaxprEqn) -> OpShardingRule:
    """`a b -> a c  whole={b, c}`."""
    return _stacked(eqn, len(shape_of(eqn)) - 1)


@register_rule(*primitives("cholesky_update"))
def _of_one_matrix(eqn: JaxprEqn) -> OpShardingRule:
    """`a b, c -> d e  whole={a, b, c, d, e}`."""
    return _stacked(eqn, 0)


@register_rule(*primitives("ormqr"))
def _ormqr(eqn: JaxprEqn) -> OpShardingRule:
    """`a b c, a d, a e f -> a e f  whole={b, c, d, e}` for a product from the left."""
    free = len(shape_of(eqn)) - (1 if eqn.params["left"] else 2)
    return _stacked(eqn, len(shape_of(eqn)) - 2, solved=2, free=free)


@register_rule(*primitives("triangular_solve"))
def _triangular_solve(eqn: JaxprEqn) -> OpShardingRule:
    """`a b c, a d e -> a d e  whole={b, c, d}` for solves from the left."""
    free = len(shape_of(eqn)) - (1 if eqn.params["left_side"] else 2)
    return _stacked(eqn, len(shape_of(eqn)) - 2, solved=1, free=free)


@register_rule(*primitives("tridiagonal_solve"))
def _tridiagonal_solve(eqn: JaxprEqn) -> OpShardingRule:
    """`a b, a c, a d, a e f -> a e f  whole={b, c, d, e}`."""
    rank = len(shape_of(eqn, 3))
    return _stacked(eqn, rank - 2, solved=3, free=rank - 1)


def _stacked(
    eqn: JaxprEqn, batch: int, solved: int | None = None, free: int | None = None
) -> OpShardingRule:
    """`batch` leading dimensions are mapped and the others whole.

    Operand `solved` has the result's dimensions; `free` is one that is mapped, and the
    op is linear in that operand.
    """
    names = fresh_names()
    stack = take(names, batch)

    def dims(shape: Sequence[int]) -> tuple[str, ...]:
        return (*stack, *take(names, len(shape) - batch))

    operands = [dims(shape) for shape in operand_shapes(eqn)]
    results = (
        [dims(shape) for shape in result_shapes(eqn)]
        if solved is None
        else [operands[solved]]
    )
    whole = {f for side in (*operands, *results) for f in side[batch:]}
    if solved is None or free is None:
        return make_rule(eqn, operands, results, whole=whole)
    whole.remove(operands[solved][free])
    return make_rule(eqn, operands, results, whole=whole, linear=[[solved]])


@register_rule(*primitives("fft"))
def _fft(eqn: JaxprEqn) -> OpShardingRule:
    """`a b -> a c  whole={b, c}` for a transform of the last dimension.

    It is linear, but sums do not pass: XLA:CPU lets a reduce-scatter behind a transform
    choose the memory order in front of it, which its transform then refuses to run.
    """
    batch = len(shape_of(eqn)) - len(eqn.params["fft_lengths"])
    changed = [d >= batch for d in range(len(shape_of(eqn)))]
    return partly_changed(eqn, changed)
