"""In: floats, and how blocks of them are written in bytes. Out: what is read back, how
far it is off, and that shards are written as the whole is.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardfn._core.quantize import dequantize, pack, quantize, unpack
from shardfn._core.quantized import DTYPES, Quantized, find_blocks
from shardfn._core.sharding import Axes, Split, flat

FLOAT32 = jnp.dtype("float32")
STEPS = {"int8": 1 / 127, "float8_e4m3fn": 32 / 448, "float8_e5m2": 8192 / 57344}
"""The widest gap between neighbours, as a part of the largest of a block."""


def read(x, how: Quantized, dtype=FLOAT32, salt: int = 0) -> np.ndarray:
    packed = pack(jnp.asarray(x), how, salt)
    assert packed.shape == how.packed(x.shape) and packed.dtype == jnp.int8
    return np.asarray(unpack(packed, how, jnp.dtype(dtype)))


def drawn(*shape: int) -> np.ndarray:
    """Blocks of very different sizes."""
    rng = np.random.default_rng(0)
    rows = 10.0 ** rng.integers(-6, 6, (shape[0], *[1] * (len(shape) - 1)))
    return (rng.standard_normal(shape) * rows).astype(np.float32)


def by_block(x: np.ndarray, how: Quantized) -> np.ndarray:
    """Blocks as rows."""
    return np.moveaxis(np.asarray(x, np.float32), how.dim, -1).reshape(-1, how.block)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim, block", [(1, 32), (0, 8), (1, 16)])
@pytest.mark.parametrize("own", ["float32", "bfloat16"])
def test_nothing_is_more_than_half_a_step_off(dtype, dim, block, own) -> None:
    how = Quantized(dtype, block, dim)
    x = jnp.asarray(drawn(16, 64)).astype(own)
    given, made = by_block(x, how), by_block(read(x, how), how)
    most = np.abs(given).max(axis=1, keepdims=True)
    # A scale is rounded to 8 bits, and so is the step with it.
    assert (np.abs(made - given) <= most * STEPS[dtype] / 2 * (1 + 2**-8)).all()
    if dtype != "int8":  # small elements of a block are as exact as large ones
        bits = {"float8_e4m3fn": 4, "float8_e5m2": 3}[dtype]
        normal = np.abs(given) > most * 2**-5
        apart = np.abs(made - given) / np.abs(given)
        assert (apart[normal] <= 2.0**-bits * (1 + 2**-6)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_rounded_stays_when_it_is_rounded_again(dtype) -> None:
    how = Quantized(dtype, 32, 1)
    once = read(drawn(16, 64), how)
    np.testing.assert_array_equal(read(once, how), once)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cut", [0, 1])
def test_shards_are_written_as_the_whole_is(dtype, cut) -> None:
    """To the last bit, and those of shards one behind the other are read as one."""
    x, how = jnp.asarray(drawn(32, 256)), Quantized(dtype, 32, 1)
    whole = quantize(x, how)
    assert whole[1].shape == how.scales(x.shape)
    shards = [quantize(part, how) for part in jnp.split(x, 4, axis=cut)]
    joined = [jnp.concatenate(each, cut) for each in zip(*shards, strict=True)]
    for ours, theirs in zip(joined, whole, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(dequantize(*joined, how, FLOAT32), read(x, how))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_zeros_stay_and_what_is_not_finite_shows(dtype, rounding) -> None:
    how = Quantized(dtype, 4, 1, rounding)
    x = np.array([[0, 0, 0, 0], [1, -2, np.nan, 4], [1, np.inf, -np.inf, 0]], "f4")
    made = read(x, how)
    np.testing.assert_array_equal(made[0], 0)
    assert np.isnan(made[1:]).all(), "in the whole block: its scale is not known"
    tiny, large = np.full((1, 4), 1e-42, "f4"), np.full((1, 4), 3e38, "f4")
    assert np.abs(read(tiny, how)).max() <= 2e-38
    np.testing.assert_allclose(read(large, how), large, rtol=2**-7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_chance_rounds_to_the_value_on_average(dtype) -> None:
    """Each device by its own chance, and each time the same."""
    how = Quantized(dtype, 128, 1, "stochastic")
    x = np.linspace(-1, 1, 128, dtype=np.float32)[None] * np.float32(0.37)
    run = jax.jit(jax.vmap(lambda salt: unpack(pack(x, how, salt), how, FLOAT32)))
    many = np.asarray(run(jnp.arange(4096, dtype=jnp.uint32)))
    most, step = np.abs(x).max(), STEPS[dtype]
    assert np.abs(many - x).max() < most * step * 1.01
    spread = most * step / 2 / np.sqrt(4096)
    assert np.abs(many.mean(axis=0) - x).max() < 5 * spread
    assert len(np.unique(many[:, 0, 40])) == 2, "it is between two neighbours"
    np.testing.assert_array_equal(read(x, how, salt=3), read(x, how, salt=3))


AXES = Axes(("replica", "data"), (2, 4))


@pytest.mark.parametrize(
    "shape, sharding, most, expected",
    [
        ((64, 256), (None, Split(0)), 128, (1, 128)),
        ((64, 256), (None, Split(1)), 128, (1, 64)),
        ((512, 256), (None, Split(1)), 128, (0, 128)),  # whole blocks first
        ((512, 50257), (None, Split(0)), 128, (0, 128)),
        ((96, 100), (None, Split(0)), 128, (1, 100)),
        ((8, 131), (None, Split(0)), 128, None),
        ((130, 64), (None, Split(0, stored=True)), 64, (1, 64)),
        ((64, 130), (None, Split(1, stored=True)), 64, (0, 64)),  # not the padded one
        ((64, 256), (Split(1), Split(1)), 32, (1, 32)),
        ((7, 9), (None, Split(flat(0), stored=True)), 8, None),
        ((), (None, None), 128, None),
    ],
)
def test_blocks_do_not_cross_the_edges_of_shards(shape, sharding, most, expected):
    assert find_blocks(shape, sharding, AXES, most) == expected
