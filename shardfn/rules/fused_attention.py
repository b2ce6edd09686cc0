"""The rules of cuDNN's attention, which `jax.nn.dot_product_attention` calls with
`implementation="cudnn"`, and of its derivative.

In: an equation of one of JAX's two primitives for it. Out: its rule: rows and heads are
independent, and each device calls the kernel on its own. Forms in which a row does not
say by itself what becomes of it have none: dropout, whose numbers depend on where a row
is, pages, and scores that a function of the user's changes.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from shardfn._core.compat import attention_heads_first, primitives
from shardfn._core.make_rule import make_rule
from shardfn._core.op_sharding_rule import Dim, OpShardingRule
from shardfn._core.rule_registry import register_rule
from shardfn.rules._factors import fresh_names, operand_shapes, take

ROWS, GROUPS, HEADS = "b", "g", "n"
"""Rows of the batch, heads of keys, and heads of queries that share one of these."""

ABSENT = "e"
"""The dimension of an empty array, which JAX passes for what it is not given."""

Shape = tuple[int, ...]
Dims = Sequence[str | Dim]

_BIAS, _LENGTHS, _OFFSETS, _PAGES = 3, slice(4, 6), slice(6, 8), slice(8, 10)
"""Which operands, behind query, key and value, these are."""


@register_rule(*primitives("dot_product_attention_fwd_wrapper"))
def _forward(eqn: JaxprEqn) -> OpShardingRule | None:
    """`b t (g n) d, b s g d, b s g v, ... -> b t (g n) v, b (g n) t`."""
    if not _rows_are_independent(eqn):
        return None
    names = _Names(eqn)
    arguments = names.arguments()
    results = [names.of_query("v"), names.statistic()][: len(eqn.outvars)]
    return names.rule(eqn, arguments, results)


@register_rule(*primitives("dot_product_attention_bwd_wrapper"))
def _backward(eqn: JaxprEqn) -> OpShardingRule | None:
    """`..., b (g n) t, b t (g n) v, b t (g n) v -> b t (g n) d, b s g d, b s g v`, and
    the gradient of a bias, a sum over the rows and heads that share it."""
    if not _rows_are_independent(eqn):
        return None
    names = _Names(eqn)
    arguments, out = names.arguments(), names.of_query("v")
    results = [names.of_query("d"), *arguments[1:4]][: len(eqn.outvars)]
    return names.rule(eqn, [*arguments, names.statistic(), out, out], results)


def _rows_are_independent(eqn: JaxprEqn) -> bool:
    params: dict[str, Any] = eqn.params
    pages = operand_shapes(eqn)[_PAGES]
    changed = params.get("score_mod") is not None
    return not (params["dropout_rate"] or changed or any(map(_is_given, pages)))


def _is_given(shape: Shape) -> bool:
    return shape != (0,)


class _Names:
    """The factors of the operands and results of one equation.

    Attributes:
      shapes: of its operands.
      heads_first: whether heads come before the positions of a row.
      sizes: of rows, groups and heads.
      fresh: names for what else there is, all of it whole.
    """

    def __init__(self, eqn: JaxprEqn) -> None:
        self.shapes = operand_shapes(eqn)
        self.heads_first = attention_heads_first(eqn)
        query, key = self.shapes[:2]
        heads = 1 if self.heads_first else 2
        self.sizes = {
            ROWS: query[0],
            GROUPS: key[heads],
            HEADS: query[heads] // key[heads],
        }
        self.fresh: Iterator[str] = (f"x{name}" for name in fresh_names())

    def of_query(self, features: str) -> Dims:
        """Dimensions of an array like the query, with its features called so."""
        return self._ordered("t", (GROUPS, HEADS), features)

    def _ordered(self, positions: str, heads: str | Dim, features: str) -> Dims:
        inner = (heads, positions) if self.heads_first else (positions, heads)
        return (ROWS, *inner, features)

    def arguments(self) -> list[Dims]:
        """Dimensions of query, key, value and what says which scores count."""
        bias = self.shapes[_BIAS]
        named = [
            self.of_query("d"),
            self._ordered("s", GROUPS, "d"),
            self._ordered("s", GROUPS, "v"),
            self._bias(bias) if _is_given(bias) else (ABSENT,),
        ]
        for shape in (*self.shapes[_LENGTHS], *self.shapes[_OFFSETS]):
            named.append(
                (ROWS, *take(self.fresh, len(shape) - 1))
                if _is_given(shape)
                else (ABSENT,)
            )
        return [*named, *[(ABSENT,)] * len(self.shapes[_PAGES])]

    def _bias(self, shape: Shape) -> Dims:
        """A bias may be the same for all rows, and for all heads."""
        rows, heads, *_ = shape
        each_head = heads == self.sizes[GROUPS] * self.sizes[HEADS]
        return (
            ROWS if rows == self.sizes[ROWS] else next(self.fresh),
            (GROUPS, HEADS) if each_head else next(self.fresh),
            *("t", "s"),
        )

    def statistic(self) -> Dims:
        """Dimensions of what the derivative needs of the scores: a number for each
        position, of packed rows for each of their segments."""
        offsets = self.shapes[_OFFSETS][0]
        rows: str | Dim = ROWS
        if len(offsets) == 2:
            rows = (ROWS, next(self.fresh))
            self.sizes[rows[1]] = offsets[1] - 1
        return (rows, (GROUPS, HEADS), "t")

    def rule(
        self, eqn: JaxprEqn, operands: Sequence[Dims], results: Sequence[Dims]
    ) -> OpShardingRule:
        """The rule: what some result lacks of rows and heads is summed over."""
        every = [{f for d in dims for f in _flat(d)} for dims in (*operands, *results)]
        made = every[len(operands) :]
        split = {ROWS, GROUPS, HEADS}
        shared = split - set.intersection(*made)
        return make_rule(
            eqn,
            operands,
            results,
            sizes=self.sizes,
            reduce=sorted(shared),
            whole=set.union(*every) - split,
        )


def _flat(dim: str | Dim) -> Dim:
    return (dim,) if isinstance(dim, str) else dim
