"""Rules of gathers and scatters."""

import jax.numpy as jnp
import numpy as np
from completeness import is_linear
from harness import equation_of, integers
from jax import lax
from table import Row, table

from shardfn._core.rule_registry import rule_of

ROWS = np.array([[3], [0], [7], [2], [3], [6]], np.int32)
SOME = np.array([[3], [0], [7], [2]], np.int32)
OUTSIDE = np.array([[-3], [0], [8], [7]], np.int32)
COLUMN = np.array([[1], [0], [1], [1], [0], [1], [1], [1]], np.int32)


def take(collapsed, start, sizes, offset, mode="clip", batching=((), ()), fill=None):
    numbers = lax.GatherDimensionNumbers(
        offset_dims=offset,
        collapsed_slice_dims=collapsed,
        start_index_map=start,
        operand_batching_dims=batching[0],
        start_indices_batching_dims=batching[1],
    )
    return lambda x, i: lax.gather(
        x, i, numbers, slice_sizes=sizes, mode=mode, fill_value=fill
    )


@table(
    Row(
        take((0,), (0,), (1, 5), (1,)),
        ((8, 5), ROWS),
        "a b, c d -> c b  whole={a, d}",
        ({0},),
        needless=("a:sum",),
    ),
    Row(
        take((0,), (0,), (1, 5), (1,)),
        ((8, 5), SOME),
        "a b, c d -> c b  reduce={a}  whole={d}",
        ({0},),
    ),
    Row(
        take((0,), (0,), (1, 5), (1,), "promise_in_bounds"),
        ((9, 5), np.array([[8], [0]], np.uint8)),
        "a b, c d -> c b  reduce={a}  whole={d}",
        ({0},),
    ),
    Row(
        take((), (0,), (2, 5), (1, 2)),
        ((8, 5), ROWS),
        "a b, c d -> c e b  whole={a, d, e}",
        ({0},),
    ),
    Row(
        take((1,), (1,), (6, 1), (0,)),
        ((6, 8), ROWS),
        "a b, c d -> a c  whole={b, d}",
        ({0},),
        needless=("b:sum",),
    ),
    Row(
        take((1,), (1,), (1, 1), (), batching=((0,), (0,))),
        ((8, 5), COLUMN),
        "a b, a c -> a  reduce={b}  whole={c}",
        ({0},),
    ),
    Row(
        take((0,), (0,), (1, 5), (1,), "fill"),
        ((8, 5), np.array([[3], [99], [7], [-1]], np.int32)),
        "a b, c d -> c b  reduce={a}  whole={d}",
        ({0},),
    ),
    Row(
        take((0,), (0,), (1, 5), (1,), "fill", fill=7.0),
        ((8, 5), np.array([[3], [99], [7], [-1]], np.int32)),
        "a b, c d -> c b  reduce={a}  whole={d}",
    ),
    Row(
        take((0,), (0,), (1, 5), (1,), "fill"),
        (integers((8, 5), jnp.int32), ROWS),
        "a b, c d -> c b  whole={a, d}",
        needless=("a:sum", "a:or"),
    ),
    Row(
        take((0,), (0,), (1, 5), (1,), "fill"),
        (integers((8, 5), jnp.int32), np.array([[3], [99], [7], [-1]], np.int32)),
        "a b, c d -> c b  reduce={a}  whole={d}",
    ),
    Row(
        take((0,), (0, 1), (1, 5), (1,), "fill"),
        ((8, 5), np.array([[3, 0], [1, 1], [7, 0], [2, 0]], np.int32)),
        "a b, c d -> c b  reduce={a}  whole={d}",
        ({0},),
    ),
    Row(  # looked up, and covered by each window: filled unless it is at 0
        take((0,), (0, 1), (1, 5), (1,), "fill"),
        ((16, 5), np.array([[3, 0], [1, 2], [7, 0], [2, -1]], np.int32)),
        "a b, c d -> c b  reduce={a}  whole={d}",
        ({0},),
    ),
    Row(  # dropped, but not looked up: always its first element
        take((0, 1), (1,), (1, 1), ()),
        ((8, 5), np.array([[4], [1]], np.int32)),
        "a b, c d -> c  reduce={b}  whole={a, d}",
        ({0},),
    ),
)
def test_gather_rule(row):
    row.check()


def put(op, inserted=(0,), to=(0,), window=(1,), batching=((), ()), **params):
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=window,
        inserted_window_dims=inserted,
        scatter_dims_to_operand_dims=to,
        operand_batching_dims=batching[0],
        scatter_indices_batching_dims=batching[1],
    )
    return lambda x, i, u: op(x, i, u, numbers, **params)


JOINT = ({0, 2},)


@table(
    Row(
        put(lax.scatter_add),
        ((8, 5), ROWS, (6, 5)),
        "a b, c d, c b -> a b  reduce={c}  whole={d}",
        JOINT,
    ),
    Row(
        put(lax.scatter_sub),
        ((8, 5), SOME, (4, 5)),
        "a b, c d, c b -> a b  reduce={c}  whole={d}",
        JOINT,
    ),
    Row(
        put(lax.scatter_add, (), window=(1, 2)),
        ((8, 5), ROWS, (6, 2, 5)),
        "a b, c d, c e b -> a b  reduce={c}  whole={a, d, e}",
        JOINT,
    ),
    Row(
        put(lax.scatter_add, (1,), (1,), (), ((0,), (0,))),
        ((8, 5), COLUMN, (8,)),
        "a b, a c, a -> a b  whole={c}",
        JOINT,
    ),
    Row(
        put(lax.scatter_add, (1,), (1,), (0,)),
        ((6, 8), ROWS, (6, 6)),
        "a b, c d, a c -> a b  reduce={c}  whole={d}",
        JOINT,
    ),
    Row(
        put(lax.scatter_max),
        ((8, 5), ROWS, (6, 5)),
        "a b, c d, c b -> a b  reduce={c:max}  whole={d}",
    ),
    Row(
        put(lax.scatter_min, mode="promise_in_bounds"),
        ((8, 5), ROWS, (6, 5)),
        "a b, c d, c b -> a b  reduce={c:min}  whole={d}",
    ),
    Row(
        put(lax.scatter_mul),
        ((8, 5), SOME, (4, 5)),
        "a b, c d, c b -> a b  whole={c, d}",
        ({0},),
    ),
    Row(
        put(lax.scatter),
        ((8, 5), SOME, (4, 5)),
        "a b, c d, c b -> a b  whole={c, d}",
    ),
    Row(
        put(lax.scatter, mode="drop"),
        ((8, 5), OUTSIDE, (4, 5)),
        "a b, c d, c b -> a b  whole={c, d}",
    ),
    Row(
        put(lax.scatter_add, mode="clip"),
        ((8, 5), OUTSIDE, (4, 5)),
        "a b, c d, c b -> a b  reduce={c}  whole={d}",
        JOINT,
    ),
    Row(
        put(lax.scatter_add, mode="drop"),
        ((300, 5), np.array([[255], [0], [128], [255]], np.uint32), (4, 5)),
        "a b, c d, c b -> a b  reduce={c}  whole={d}",
        JOINT,
    ),
    Row(
        put(lax.scatter, unique_indices=True),
        ((8, 5), SOME, (4, 5)),
        "a b, c d, c b -> a b  whole={c, d}",
        JOINT,
    ),
    Row(  # looked up, and covered by each window: dropped unless it is at 0
        put(lax.scatter, to=(0, 1)),
        ((8, 5), np.array([[3, 0], [0, 0], [2, 1], [6, 0]], np.int32), (4, 5)),
        "a b, c d, c b -> a b  whole={c, d}",
    ),
    Row(
        put(lax.scatter, to=(0, 1), mode="clip"),
        ((8, 5), np.array([[3, 0], [9, 1], [2, -3], [6, 4]], np.int32), (4, 5)),
        "a b, c d, c b -> a b  whole={c, d}",
    ),
    Row(
        put(lax.scatter_add, to=(0, 1), mode="promise_in_bounds"),
        ((8, 5), np.array([[3, 0], [0, 0], [3, 0], [6, 0]], np.int32), (4, 5)),
        "a b, c d, c b -> a b  reduce={c}  whole={d}",
        JOINT,
    ),
    Row(
        put(lax.scatter_add, (), (1, 0), (1, 2)),
        ((8, 5), np.array([[0, 3], [0, 7], [0, 6], [1, 2]], np.int32), (4, 2, 5)),
        "a b, c d, c e b -> a b  reduce={c}  whole={a, d, e}",
        JOINT,
    ),
    Row(
        put(lax.scatter, (1,), (1, 2), (1,), ((0,), (0,)), mode="clip"),
        ((4, 6, 8), np.array([[2, 0], [0, 0], [5, 7], [1, -1]], np.int32), (4, 8)),
        "a b c, a d, a c -> a b c  whole={d}",
    ),
    Row(
        put(lax.scatter_max, (1,), (2, 1), (1,), ((0,), (0,))),
        ((4, 6, 8), np.array([[0, 2], [0, 0], [1, 5], [0, 1]], np.int32), (4, 8)),
        "a b c, a d, a c -> a b c  whole={d}",
    ),
)
def test_scatter_rule(row):
    row.check()


def test_a_scatter_that_computes_is_not_linear():
    """`apply` is a scatter of zeros, whose reducer computes `f` of the operand."""

    def apply(x):
        return x.at[SOME[:, 0]].apply(jnp.square, unique_indices=True)

    eqn, values = equation_of(apply, integers((8, 5)), name="scatter")
    rule = rule_of(eqn)
    assert str(rule) == "a b, c d, c b -> a b  whole={c, d}"
    assert rule.linear == ()
    assert not is_linear(eqn, values, {0}, 0, integer=True)


def test_embedding_gradient_reduces_over_the_tokens():
    def accumulate(table, tokens, ct):
        return table.at[tokens].add(ct)

    Row(
        accumulate,
        ((8, 5), np.array([[1, 2, 3], [4, 5, 7], [0, 0, 1], [2, 2, 6]]), (4, 3, 5)),
        "a b, c d e, c d b -> a b  reduce={c, d}  whole={e}",
        JOINT,
        name="scatter-add",
    ).check()
