"""Rules of random numbers: the same bits at every device count."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import (
    Split,
    as_numpy,
    assert_every_factor_matches_unsharded,
    equation_of,
    evaluate,
    integers,
)
from jax.sharding import PartitionSpec as P
from table import Row, table

from shardfn._core.compat import primitives
from shardfn._core.rule_registry import LocalOp, rule_of, run_local
from shardfn.rules.random import _block_counts, _times

KEY = jax.random.key(3)
KEYS = jax.random.split(KEY, 5)
BITS = primitives("random_bits")[0]


def bits(shape, width=32):
    return lambda key: BITS.bind(key, bit_width=width, shape=shape)


@table(
    Row(bits((8, 5)), (KEY,), "-> a b"),
    Row(bits((5, 7, 6), 8), (KEY,), "-> a b c"),
    Row(bits((8, 5), 16), (KEY,), "-> a b"),
    Row(bits((5, 8)), (KEYS,), "a -> a b c"),
    Row(bits(()), (KEYS,), "a -> a"),
    Row(
        lambda key: jax.random.split(key, (8, 3)), (KEY,), "-> a b", name="random_split"
    ),
    Row(
        lambda keys: jax.vmap(lambda key: jax.random.split(key, 6))(KEYS),
        (KEYS,),
        "a -> a b",
        name="random_split",
    ),
    Row(jax.random.clone, (KEYS,), "a -> a", flat=True),
    Row(jax.random.key_data, (KEYS,), "a -> a b  whole={b}"),
    Row(
        jax.random.wrap_key_data,
        (integers((8, 2), jnp.uint32),),
        "a b -> a  whole={b}",
    ),
    Row(
        lambda keys: jax.vmap(jax.random.fold_in)(KEYS, jnp.arange(5)),
        (KEYS,),
        "a, a -> a",
        flat=True,
        name="random_fold_in",
    ),
    Row(
        lambda seeds: jax.vmap(jax.random.key)(seeds),
        (np.arange(6),),
        "a -> a",
        flat=True,
        name="random_seed",
    ),
)
def test_random_rule(row):
    row.check()


def test_64_bit_numbers_need_both_words_of_the_hash():
    with jax.enable_x64(True):
        eqn, values = equation_of(bits((8, 5), 64), KEY)
        assert eqn.outvars[0].aval.dtype == jnp.uint64
        assert_every_factor_matches_unsharded(eqn, values)


def test_several_split_dimensions_at_once():
    eqn, (key,) = equation_of(bits((5, 6, 4)), KEY)
    expected = np.asarray(evaluate(eqn, [key])[0])
    parts = (("a", ("x",), 2), ("b", ("y",), 3))
    op = LocalOp(eqn, rule_of(eqn), parts, ((3, 2, 4),))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:6]).reshape(2, 3), ("x", "y"))
    run = jax.shard_map(
        lambda key: run_local(op, key)[0],
        mesh=mesh,
        in_specs=P(),
        out_specs=P("x", "y"),
    )
    assert (np.asarray(jax.jit(run)(key))[:5] == expected).all()


def test_only_blocks_are_made():
    """Law 4: no array of the global size, in one program for every device."""
    eqn, (key,) = equation_of(bits((64, 96)), KEY)
    split = Split(eqn, rule_of(eqn), "a", 4)
    jaxpr = jax.make_jaxpr(split.run)(key)
    (body,) = [e.params["jaxpr"] for e in jaxpr.eqns if "shard_map" in str(e.primitive)]
    sizes = [math.prod(v.aval.shape) for e in body.eqns for v in e.outvars]
    assert max(sizes) == 64 * 96 // 4


@pytest.mark.parametrize("start", [0, 5, 2**32 - 3, 2**31 + 7])
@pytest.mark.parametrize("factor", [1, 3, 2**31, 2**32 - 1, 2**33 + 5, 2**63 + 1])
def test_products_are_of_64_bits(start, factor):
    index = np.arange(4, dtype=np.uint64) + np.uint64(start)
    high, low = _times(jnp.asarray(index % 2**32, jnp.uint32), factor)
    got = [(int(h) << 32) + int(x) for h, x in zip(high, low, strict=True)]
    assert got == [int(i) % 2**32 * factor % 2**64 for i in index]


def test_counts_beyond_32_bits():
    shape, starts = (70_000, 3, 70_000), (69_990, 1, 69_995)
    high, low = _block_counts(shape, (3, 2, 4), starts)
    index = np.ravel_multi_index(
        np.ix_(*(s + np.arange(n) for s, n in zip(starts, (3, 2, 4), strict=True))),
        shape,
    )
    counts = (np.asarray(high, np.uint64) << np.uint64(32)) + np.asarray(low, np.uint64)
    assert (counts == index).all() and np.asarray(high).any()


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_bits_of_other_generators_are_whole(impl):
    """Also over an array of keys, of which JAX uses the first."""
    key = jax.random.key(0, impl=impl)
    eqn, _ = equation_of(bits((8, 5)), key)
    assert str(rule_of(eqn)) == "-> a b  whole={a, b}"
    keys = jax.random.split(key, 4)
    numbers = jnp.arange(4, dtype=jnp.uint32)
    for fn, args, expected in [
        (bits((5,)), [keys], "a -> a b  whole={a, b}"),
        (jax.vmap(jax.random.split), [keys], "a -> a b  whole={a, b}"),
        (jax.vmap(jax.random.fold_in), [keys, numbers], "a, a -> a  whole={a}"),
    ]:
        eqn, _ = equation_of(fn, *args)
        assert str(rule_of(eqn)) == expected


def test_bits_are_whole_if_threefry_is_not_partitionable():
    with jax.threefry_partitionable(False):
        eqn, _ = equation_of(bits((8, 5)), KEYS)
        assert str(rule_of(eqn)) == "a -> a b c  whole={b, c}"
        assert_every_factor_matches_unsharded(eqn, [KEYS])


def test_gamma_splits_over_keys_only():
    alpha = integers((5, 2)) ** 2
    gamma = primitives("random_gamma")[0]
    eqn, values = equation_of(
        lambda k, a: gamma.bind(k, a, log_space=True), KEYS, alpha
    )
    assert str(rule_of(eqn)) == "a, a b -> a b  whole={b}"
    assert_every_factor_matches_unsharded(eqn, values)


def test_hash_is_elementwise():
    words = [integers((8, 5), jnp.uint32, seed=i) for i in range(4)]
    hash_p = primitives("threefry2x32")[0]
    eqn, values = equation_of(lambda *w: hash_p.bind(*w), *words)
    assert str(rule_of(eqn)) == "a b, a b, a b, a b -> a b, a b"
    assert_every_factor_matches_unsharded(eqn, values)


def test_generator_state_is_whole():
    eqn, values = equation_of(
        lambda k: jax.lax.rng_bit_generator(k, (8, 5)), integers((4,), jnp.uint32)
    )
    assert str(rule_of(eqn)) == "a -> b, c d  whole={a, b, c, d}"
    assert as_numpy(evaluate(eqn, values)[1]).any()
