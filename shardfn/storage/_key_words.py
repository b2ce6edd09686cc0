"""PRNG keys as their words, which is how they are on disk.

In: avals and arrays of typed keys, or of anything else. Out: those of their words, and
keys again; anything else as it is.
"""

import functools
from typing import Any

import jax

from shardfn._core import compat


def words_of(aval: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The aval of the words of keys, or of other values; keys are not split."""
    if not compat.is_key(aval.dtype):
        return aval
    words = _words(aval.shape, aval.dtype)
    return jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=aval.sharding)


@functools.cache  # JAX remembers every trace, also of the same
def _words(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    keys = jax.ShapeDtypeStruct(shape, dtype)
    return jax.eval_shape(jax.random.key_data, keys)


def in_words(x: jax.Array) -> jax.Array:
    return jax.random.key_data(x) if compat.is_key(x.dtype) else x


def from_words(x: jax.Array, dtype: Any) -> jax.Array:
    """The array of `dtype` whose words, or values, are `x`."""
    if not compat.is_key(dtype):
        return x
    return jax.random.wrap_key_data(x, impl=_implementation(dtype))


@functools.cache
def _implementation(dtype: Any) -> Any:
    """Of PRNG keys; JAX tells it of arrays only."""
    found: list[Any] = []
    key = jax.ShapeDtypeStruct((), dtype)
    jax.eval_shape(lambda k: found.append(jax.random.key_impl(k)), key)
    return found[0]
