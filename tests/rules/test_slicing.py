"""Rules of slices, paddings and updates: what each device gives of a window."""

import jax.numpy as jnp
import numpy as np
import pytest
from harness import equation_of, integers
from jax import lax
from table import Row, table

from shardfn._core.rule_registry import rule_of

EACH = ({0},)
SHORT = "a b -> c b  reduce={a}  whole={c}"
LONG = "a b -> c b  whole={a, c}"
FLAGS = integers((8, 5)) > 0


@table(
    Row(lambda x: x[3:7], ((8, 5),), SHORT, EACH),
    Row(lambda x: x[-2:], ((9, 5),), SHORT, EACH),
    Row(lambda x: x[:, 1:3], ((8, 5),), "a b -> a c  reduce={b}  whole={c}", EACH),
    Row(lambda x: x[1:3], (integers((8, 5), jnp.int8),), SHORT, EACH),
    Row(lambda x: x[1:3], (FLAGS,), "a b -> c b  reduce={a:or}  whole={c}"),
    Row(
        lambda x: x[2:4, :2],
        ((8, 4),),
        "a b -> c d  reduce={a, b}  whole={c, d}",
        EACH,
    ),
    # Right too, but an all-reduce of it is more than a gather of what it is cut from.
    Row(lambda x: x[1:], ((8, 5),), LONG, EACH, needless=("a:sum",)),
    Row(lambda x: x[::2], ((8, 5),), LONG, EACH),
)
def test_slice_rule(row):
    row.check()


PADDED = "a b,  -> c b  whole={a}"
BOTH = ({0, 1},)


@table(
    Row(lambda x, v: lax.pad(x, v, ((6, 1, 0), (0, 0, 0))), ((1, 5), ()), PADDED, BOTH),
    Row(lambda x, v: lax.pad(x, v, ((3, 3, 0), (0, 0, 0))), ((3, 5), ()), PADDED, BOTH),
    Row(
        lambda x, v: lax.pad(x, v, ((1, -1, 0), (0, 0, 0))),
        ((8, 5), ()),
        PADDED,
        BOTH,
    ),
    Row(
        lambda x, v: lax.pad(x, v, ((-2, -3, 0), (2, 2, 0))),
        ((9, 4), ()),
        "a b,  -> c d  whole={a, b}",
        BOTH,
    ),
    Row(
        lambda x, v: lax.pad(x, v, ((0, 0, 0), (1, 2, 1))),
        ((5, 8), ()),
        "a b,  -> a c  whole={b, c}",
        BOTH,
    ),
)
def test_pad_rule(row):
    row.check()


def cut(size):
    return lambda x, i: lax.dynamic_slice(x, (i, 0), (size, 5))


def put(x, u, i):
    return lax.dynamic_update_slice(x, u, (i, 0))


@table(
    *(
        Row(
            cut(3),
            ((8, 5), np.int32(start)),
            "a b, ,  -> c b  reduce={a}  whole={c}",
            EACH,
            name="dynamic_slice",
        )
        # JAX moves a start so that the window lies inside.
        for start in (-3, 2, 99)
    ),
    Row(
        cut(5),
        ((8, 5), np.int32(1)),
        "a b, ,  -> c b  whole={a, c}",
        EACH,
        name="dynamic_slice",
        needless=("a:sum",),
    ),
    *(
        Row(
            put,
            ((8, 5), (size, 5), np.int32(start)),
            "a b, c b, ,  -> a b  whole={c}",
            ({0, 1},),
            name="dynamic_update_slice",
        )
        for size, start in ((3, 1), (7, -2))
    ),
)
def test_dynamic_slice_rule(row):
    row.check()


@pytest.mark.parametrize("dtype", [jnp.int4, jnp.float8_e4m3fn])
def test_types_without_sums_are_cut_whole(dtype):
    eqn, _ = equation_of(lambda x: x[:1], jnp.ones((8, 5), dtype))
    assert rule_of(eqn).whole == {"a", "c"}
