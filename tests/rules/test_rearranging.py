"""Rules of ops that rearrange elements."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import (
    Split,
    assert_every_factor_matches_unsharded,
    equation_of,
    integers,
)
from jax import lax
from table import Row, table

from shardfn._core.compat import primitives
from shardfn._core.rule_registry import rule_of
from shardfn._core.shift import shift

EACH = ({0},)


def widen(shape, dims):
    return lambda x: lax.broadcast_in_dim(x, shape, dims)


@table(
    Row(lambda x: x.T, ((8, 5),), "a b -> b a", EACH),
    Row(lambda x: x.transpose(2, 0, 1), ((4, 5, 6),), "a b c -> c a b", EACH),
    Row(widen((5, 8), (1,)), ((8,),), "b -> a b", EACH),
    Row(widen((5, 8), ()), ((),), "-> a b", EACH, flat=True),
    Row(widen((8, 5), (0, 1)), ((8, 1),), "a c -> a b", EACH),
    Row(lambda x: lax.squeeze(x, (1,)), ((8, 1, 5),), "a b c -> a c", EACH, flat=True),
    Row(lambda x: lax.squeeze(x, (0,)), ((1,),), "a ->", EACH),
    Row(lambda x: lax.rev(x, (1,)), ((8, 4),), "a b -> a b  whole={b}", EACH),
    Row(lambda x: shift(x, 0, 3), ((8, 5),), "a b -> a b  shift={a: 3}", EACH),
    Row(lambda x: shift(x, 1, 3), ((5, 4),), "a b -> a b  shift={b: -1}", EACH),
    Row(
        lambda x, y: lax.concatenate([x, y], 1),
        ((8, 5), (8, 4)),
        "a b, a c -> a d  whole={b, c, d}",
        ({0, 1},),
    ),
    Row(
        lambda x, y: lax.concatenate([x, y], 0),
        ((4, 5), (4, 5)),
        "a b, c b -> d b  whole={a, c, d}",
        ({0, 1},),
    ),
    Row(
        lambda x: lax.split(x, (1, 3), 1),
        ((5, 4),),
        "a d -> a b, a c  whole={b, c, d}",
        EACH,
    ),
    Row(
        lambda x, y: jnp.stack([x, y], 1),
        ((8, 5), (8, 5)),
        "a b, a b -> a c b  whole={c}",
        ({0, 1},),
        name="stack",
    ),
    Row(
        lambda x: jnp.unstack(x, axis=1),
        ((8, 2, 5),),
        "a b c -> a c, a c  whole={b}",
        EACH,
        name="unstack",
    ),
    Row(
        lambda x: lax.tile(x, (1, 4)),
        ((5, 6),),
        "a b -> a (c b)  whole={b}",
        EACH,
    ),
    Row(lambda x: lax.tile(x, (6, 1)), ((1, 5),), "a b -> (c a) b  whole={a}", EACH),
)
def test_shape_rule(row):
    row.check()


@pytest.mark.parametrize("dtype", ["int32", "int8", "uint32", "float32", "bfloat16"])
@pytest.mark.parametrize("shape, dimension", [((8, 5), 0), ((5, 517), 1)])
def test_iota_counts_from_the_start_of_the_block(dtype, shape, dimension):
    """517 wraps around in int8 and is rounded in bfloat16."""
    eqn, values = equation_of(lambda: lax.broadcasted_iota(dtype, shape, dimension))
    assert str(rule_of(eqn)) == "-> a b"
    assert_every_factor_matches_unsharded(eqn, values)


def test_empty_is_made_anywhere():
    eqn, values = equation_of(lambda: lax.empty((8, 5), jnp.float32))
    assert str(rule_of(eqn)) == "-> a b"
    split = Split(eqn, rule_of(eqn), "a", 4)
    assert split.run(*values)[0].shape == (8, 5)
    (empty2,) = primitives("empty2")
    params = {"dtype": jnp.float32, "memory_space": jax.memory.Space.Device}
    eqn, _ = equation_of(lambda: empty2.bind(**params))
    assert str(rule_of(eqn)) == "->"


RESHAPES = [
    ((6, 4), (24,), "a b -> (a b)"),
    ((24,), (4, 3, 2), "(a b c) -> a b c"),
    ((8, 6), (48,), "a b -> (a b)"),
    ((8, 6), (12, 4), "(a b) c -> (a d) e  whole={b, c, d, e}"),
    ((8, 4), (4, 8), "(a b) c -> a (b c)"),
    ((8, 1, 5), (8, 5), "a c b -> a b"),
    ((5, 6), (5, 1, 6), "a b -> a c b"),
    ((5,), (5, 1), "a -> a b"),
    ((1, 6), (6,), "b a -> a"),
    ((4, 9, 5), (12, 3, 5), "a (b c) d -> (a b) c d"),
    ((3, 8, 6, 5), (3, 12, 4, 5), "a (b c) d g -> a (b e) f g  whole={c, d, e, f}"),
    ((1,), (1, 1), "a -> b c"),
    ((7, 5), (5, 7), "a b -> c d  whole={a, b, c, d}"),
    ((4, 10), (8, 5), "a (b c) -> (a b) c"),
]


@pytest.mark.parametrize("old, new, expected", RESHAPES)
def test_reshape_rule(old, new, expected):
    Row(lambda x: lax.reshape(x, new), (old,), expected, EACH, flat=True).check()


def test_reshape_to_and_from_a_scalar_is_not_flat():
    Row(lambda x: lax.reshape(x, ()), ((1,),), "a ->", EACH).check()
    Row(lambda x: lax.reshape(x, (1,)), ((),), "-> a", EACH).check()


def test_reshape_of_nothing_is_whole():
    eqn, _ = equation_of(lambda x: lax.reshape(x, (3, 0)), jnp.zeros((0, 4)))
    assert str(rule_of(eqn)) == "a b -> c d  whole={a, b, c, d}"


@pytest.mark.parametrize(
    "shape, order, new, expected",
    [
        ((4, 5), (1, 0), (20,), "b a -> (a b)"),
        ((2, 8, 4), (1, 0, 2), (4, 16), "c (a b) d -> a (b c d)"),
        ((2, 8, 3), (2, 1, 0), (24, 2), "c b a -> (a b) c"),
    ],
)
def test_reshape_that_permutes(shape, order, new, expected):
    def reshape(x):
        return lax.reshape_p.bind(x, new_sizes=new, dimensions=order, sharding=None)

    Row(reshape, (shape,), expected, EACH).check()


def test_zeros_are_refused():
    eqn, values = equation_of(lax.neg, np.zeros((4,), np.float32))
    with pytest.raises(AssertionError, match="the test's data are all zero"):
        assert_every_factor_matches_unsharded(eqn, values)


def test_integers_are_never_zero():
    assert integers((50, 50)).all()
