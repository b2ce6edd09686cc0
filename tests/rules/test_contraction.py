"""Rules of matrix products and convolutions."""

import jax.numpy as jnp
import numpy as np
from harness import integers
from jax import lax
from table import Row, table

EACH = ({0}, {1})
BOOLEAN = np.random.default_rng(0).random((8, 12)) > 0.7


def conv(lhs, rhs, dims="NCH,OIH,NCH", **params):
    defaults = {"window_strides": (1,), "padding": ((0, 0),)}
    numbers = tuple(dims.split(","))
    return lax.conv_general_dilated(
        lhs, rhs, dimension_numbers=numbers, **(defaults | params)
    )


@table(
    Row(lambda x, w: x @ w, ((8, 12), (12, 4)), "b a, a c -> b c  reduce={a}", EACH),
    Row(lambda x, w: x @ w, ((5, 6), (6,)), "b a, a -> b  reduce={a}", EACH),
    Row(lax.dot, ((6,), (6,)), "a, a ->   reduce={a}", EACH),
    Row(
        lambda x, y: jnp.einsum("bqhd,bkhd->bhqk", x, y),
        ((2, 4, 3, 5), (2, 6, 3, 5)),
        "a d b c, a e b c -> a b d e  reduce={c}",
        EACH,
        name="dot_general",
    ),
    Row(
        lambda x, w: lax.dot(x, w, preferred_element_type=jnp.float32),
        (integers((4, 8), jnp.bfloat16), integers((8, 3), jnp.bfloat16)),
        "b a, a c -> b c  reduce={a}",
        EACH,
    ),
    Row(
        lambda x: lax.dot(x, x.T),
        (BOOLEAN,),
        "b a, a c -> b c  reduce={a:or}",
        name="dot_general",
    ),
    Row(
        lambda x: lax.dot(x, x.T, preferred_element_type=jnp.int32),
        (BOOLEAN,),
        "b a, a c -> b c  reduce={a}",
        name="dot_general",
    ),
)
def test_dot_general_rule(row):
    row.check()


@table(
    Row(
        conv,
        ((5, 4, 7), (6, 4, 3)),
        "n i a, o i b -> n o c  reduce={i}  whole={a, b, c}",
        EACH,
    ),
    Row(
        lambda x, w: conv(x, w, "NHC,HIO,NHC", padding=((1, 1),)),
        ((8, 6, 3), (3, 3, 5)),
        "n a i, b i o -> n c o  reduce={i}  whole={a, b, c}",
        EACH,
    ),
    Row(
        conv,
        ((3, 4, 7), (6, 4, 1)),
        "n i a, o i b -> n o a  reduce={i}  whole={b}",
        EACH,
    ),
    Row(
        lambda x, w: conv(x, w, feature_group_count=4),
        ((5, 8, 7), (12, 2, 3)),
        "n (g i) a, (g o) i b -> n (g o) c  reduce={i}  whole={a, b, c}",
        EACH,
    ),
    Row(
        lambda x, w: conv(x, w, feature_group_count=6),
        ((5, 6, 7), (6, 1, 3)),
        "n (g i) a, (g o) i b -> n (g o) c  reduce={i}  whole={a, b, c}",
        EACH,
    ),
    Row(
        lambda x, w: conv(x, w, batch_group_count=4),
        ((8, 5, 7), (12, 5, 3)),
        "(g n) i a, (g o) i b -> n (g o) c  reduce={i}  whole={a, b, c}",
        EACH,
    ),
    Row(
        lambda x, w: conv(x, w, batch_group_count=6),
        ((6, 5, 7), (6, 5, 3)),
        "(g n) i a, (g o) i b -> n (g o) c  reduce={i}  whole={a, b, c}",
        EACH,
    ),
    Row(
        lambda x, w: conv(x, w, window_strides=(2,)),
        ((5, 4, 8), (6, 4, 1)),
        "n i a, o i b -> n o c  reduce={i}  whole={a, b, c}",
        EACH,
    ),
    Row(
        lambda x, w: conv(x, w, lhs_dilation=(2,), padding=((1, 1),)),
        ((5, 4, 8), (6, 4, 3)),
        "n i a, o i b -> n o c  reduce={i}  whole={a, b, c}",
        EACH,
    ),
    Row(
        lambda x: conv(x, x[:3, :, :1]),
        (BOOLEAN.reshape(6, 8, 2),),
        "n i a, o i b -> n o a  reduce={i:or}  whole={b}",
        name="conv_general_dilated",
    ),
)
def test_conv_rule(row):
    row.check()


SIZES = jnp.array([3, 0, 5], jnp.int32)


def ragged(contract, lhs_ragged, groups, batch=((), ())):
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(contract, batch),
        lhs_ragged_dimensions=[lhs_ragged],
        rhs_group_dimensions=groups,
    )
    return lambda x, y, sizes: lax.ragged_dot_general(x, y, sizes, numbers)


@table(
    Row(
        lax.ragged_dot,
        ((8, 4), (3, 4, 5), SIZES),
        "b a, c a d, e -> b d  reduce={a}  whole={c, e}",
        EACH,
    ),
    Row(
        lax.ragged_dot,
        ((8, 4), (3, 4, 5), jnp.array([2, 0, 3], jnp.int32)),
        "b a, c a d, e -> b d  reduce={a}  whole={c, e}",
        EACH,
    ),
    Row(
        ragged(([0], [0]), 0, []),
        ((8, 4), (8, 5), SIZES),
        "a b, a c, e -> d b c  reduce={a}  whole={d, e}",
        EACH,
    ),
    Row(
        ragged(([0], [0]), 0, []),
        ((8, 4), (8, 5), jnp.array([0, 5, 1], jnp.uint8)),
        "a b, a c, e -> d b c  reduce={a}  whole={d, e}",
        EACH,
    ),
    Row(
        ragged(([2], [2]), 1, [1], ([0], [0])),
        ((4, 8, 5), (4, 3, 5, 6), jnp.stack([SIZES] * 4)),
        "a c b, a d b e, a f -> a c e  reduce={b}  whole={d, f}",
        EACH,
    ),
)
def test_ragged_dot_rule(row):
    row.check()
