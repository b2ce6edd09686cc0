"""The rule of reshape: the factors that the old and the new shape are both made of.

In: a reshape equation. Out: its rule; a dimension may be a product of factors.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import jax
from jax.extend.core import JaxprEqn

from shardfn._core.compat import primitives
from shardfn._core.make_rule import make_rule
from shardfn._core.op_sharding_rule import Dim, OpShardingRule, factor_names
from shardfn._core.rule_registry import LocalOp, register_rule
from shardfn.rules._factors import fresh_names, result_shape, shape_of


def _reshape_local(op: LocalOp, operand: jax.Array) -> Sequence[jax.Array]:
    return [operand] if op.is_flat else op.bind(operand, new_sizes=op.result_shapes[0])


@register_rule(*primitives("reshape"), local=_reshape_local)
def _reshape(eqn: JaxprEqn) -> OpShardingRule:
    """`(a b) c -> a (b c)` for `(6, 4) -> (2, 12)`. Flattened blocks do not change.

    With `dimensions`, those of the operand are read in that order: `c (a b) -> ...`.
    """
    shape, result = shape_of(eqn), result_shape(eqn)
    order = eqn.params["dimensions"] or tuple(range(len(shape)))
    if 0 in shape:
        names = factor_names(len(shape) + len(result))
        sides = [names[: len(shape)]], [names[len(shape) :]]
        return make_rule(eqn, *sides, whole=names)
    read, after, sizes, whole = common_factors([shape[d] for d in order], result)
    before = [dims for _, dims in sorted(zip(order, read, strict=True))]
    return make_rule(
        eqn,
        [before],
        [after],
        sizes=sizes,
        whole=whole,
        linear="each",
        flat=bool(shape and result) and list(order) == sorted(order),
        regroups=True,
    )


Segment = tuple[int, int, str]
"""A factor: how many elements it spans, how many one step along it spans, its name."""


def common_factors(
    old: Sequence[int], new: Sequence[int]
) -> tuple[list[Dim], list[Dim], dict[str, int], set[str]]:
    """Factors that two shapes of the same number of elements are both made of.

    A *cut* is the number of elements that follow some dimension of a shape. Between
    two cuts that both shapes have, all their cuts together give the factors if each
    divides the one before. If not, a common divisor of the first dimensions is split
    off and the rest is whole. No more is lost: a later factor is never a block of both.

    Returns:
      The factors per dimension of `old` and of `new`, their sizes, the whole ones.
    """
    names = fresh_names()
    cuts = _cuts(old), _cuts(new)
    segments: tuple[list[Segment], list[Segment]] = ([], [])
    whole: set[str] = set()
    for upper, lower in pairwise(_descending({*cuts[0]} & {*cuts[1]})):
        runs = [[c for c in side if upper >= c >= lower] for side in cuts]
        merged = _descending({*runs[0], *runs[1]})
        if not all(major % minor == 0 for major, minor in pairwise(merged)):
            sizes = (upper // max(c for c in run if c < upper) for run in runs)
            merged = _descending({upper, upper // math.gcd(*sizes)})
        shared = _named(merged, names)
        for side, run in zip(segments, runs, strict=True):
            rest = _named([merged[-1], *(c for c in run if c < merged[-1])], names)
            side += [*shared, *rest]
            whole |= {name for _, _, name in rest}
    before, after = (
        _per_dimension(side, cut, names)
        for side, cut in zip(segments, cuts, strict=True)
    )
    sizes = {name: u // v for side in segments for u, v, name in side}
    ones = {name: 1 for dim in (*before, *after) for name in dim if name not in sizes}
    return before, after, sizes | ones, whole


def _cuts(shape: Sequence[int]) -> list[int]:
    """Numbers of elements of `shape[d:]` for every d, down to 1."""
    return [math.prod(shape[d:]) for d in range(len(shape) + 1)]


def _descending(cuts: Iterable[int]) -> list[int]:
    return sorted(set(cuts), reverse=True)


def _named(cuts: Iterable[int], names: Iterator[str]) -> list[Segment]:
    return [(u, v, next(names)) for u, v in pairwise(_descending(cuts))]


def _per_dimension(
    segments: Sequence[Segment], cuts: Sequence[int], names: Iterator[str]
) -> list[Dim]:
    """The factors that lie between the cuts of each dimension; a new one of size 1."""
    dims = [
        tuple(name for u, v, name in segments if upper >= u and v >= lower)
        for upper, lower in pairwise(cuts)
    ]
    return [dim or (next(names),) for dim in dims]
