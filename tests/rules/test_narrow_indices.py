"""In: indices, starts and counts of every integer dtype, in and out of bounds. Out: a
sharded step reads and writes the elements that the plain step does, to the last bit.
"""

import os
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardfn

COLUMNS = 3
ROWS = {"int8": 120, "uint8": 320}  # more than uint8 counts; jax.numpy refuses int8
DTYPES = ("int8", "uint8", "uint32")  # int16, int32 and uint16 behave as their likes
MODES = ("clip", "fill", "promise_in_bounds")
# XLA's older emitters, which may be asked for to compile quickly, write an element at
# an index of int8 that is outside.
OLDER = "--xla_cpu_use_fusion_emitters=false"
EMITTERS = {OLDER[2:].split("=")[0]: True} if OLDER in os.environ["XLA_FLAGS"] else None
LOOKUP = lax.GatherDimensionNumbers((1,), (0,), (0,))


def rows_of(dtype: str) -> int:
    return ROWS.get(dtype, 320)


def indices_of(dtype: str) -> np.ndarray:
    """Eight indices, the ends of the dtype and of the rows among them."""
    info = np.iinfo(dtype)
    rows = rows_of(dtype)
    wished = (0, 3, 127, 200, rows - 1, rows, info.max, max(info.min, -1))
    return np.asarray([min(i, info.max) for i in wished], dtype)


def lookups(x: jax.Array, few: jax.Array, i: jax.Array) -> dict[str, jax.Array]:
    """Reads and writes of `x` at indices `i`, of any integer dtype."""
    size = rows_of(str(i.dtype))
    large, x = x, x[:size]
    rows = jnp.arange(size, dtype=i.dtype)
    zero, start = jnp.zeros((), i.dtype), i[6]
    inside = jnp.clip(i, 0, min(size - 1, jnp.iinfo(i.dtype).max))
    column = jnp.zeros(size, jnp.int32)
    out = {
        "getitem": x[i],
        "take": jnp.take(x, i, 0, mode="clip"),
        "two": x[i, inside % i.dtype.type(COLUMNS)],
        "along": jnp.take_along_axis(x, i[:, None], 0, mode="clip"),
        "count": x[rows, column],
        "count negative": x[rows, column - 1],
        "count add": x.at[rows, column].add(1.0),
        "compare": jnp.where(rows[:, None] < i[4], x, -x),
        "equal": (rows[:, None] == i).sum(0),
        "clamp": lax.clamp(i[0], rows, i[3]),
        "one hot": jax.nn.one_hot(i, 7),
        "slice": lax.dynamic_slice(large, (start, zero), (2, COLUMNS)),
        "slice low": lax.dynamic_slice(large, (i[7], zero), (2, COLUMNS)),
        "row": lax.dynamic_index_in_dim(x, i[2], 0, keepdims=False),
        "update": lax.dynamic_update_slice(large, few, (start, zero)),
        "update low": lax.dynamic_update_slice(large, few, (i[7], zero)),
        "raw": lax.gather(large, i[:, None], LOOKUP, (1, COLUMNS), mode="clip"),
        "segments": jax.ops.segment_sum(x[:8], i, size),
    }
    for mode in MODES:
        at = inside if mode == "promise_in_bounds" else i
        out[f"get {mode}"] = x.at[at].get(mode=mode)
        out[f"add {mode}"] = x.at[at].add(x[:8], mode=mode)
        out[f"max {mode}"] = x.at[at].max(few[:1], mode=mode)
    return out


def signs(x: jax.Array, i: jax.Array) -> dict[str, jax.Array]:
    """Short selections of a split array of -0.0, and what tells it from 0.0."""
    taken = {"slice": x[3], "slices": x[2:4], "lookup": x[i], "dynamic": x[i[0]]}
    return {name: jnp.arctan2(y, -1.0) for name, y in taken.items()}


def assert_same(step: Callable, *args: jax.Array) -> None:
    mesh = jax.make_mesh((8,), ("data",))
    sharded = shardfn.fully_shard(
        step, mesh, min_size=0, donate=False, compiler_options=EMITTERS
    )
    plain = jax.jit(step, compiler_options=EMITTERS)
    expected, got = plain(*args)[1], sharded(*args)[1]
    for (path, a), b in zip(
        jax.tree.leaves_with_path(expected), jax.tree.leaves(got), strict=True
    ):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype, path
        np.testing.assert_array_equal(a, b, err_msg=str(path))
        np.testing.assert_array_equal(np.signbit(a), np.signbit(b), str(path))


def test_indices_of_every_dtype_mean_what_they_mean_to_jax() -> None:
    def step(x, few, indices):
        return x, {str(i.dtype): lookups(x, few, i) for i in indices}

    x = jnp.arange(1.0, 1 + 320 * COLUMNS).reshape(320, COLUMNS)
    indices = [jnp.asarray(indices_of(dtype)) for dtype in DTYPES]
    with jax.numpy_dtype_promotion("standard"):
        assert_same(step, x, -jnp.ones((8, COLUMNS)), indices)


def test_a_selection_keeps_the_sign_of_zero() -> None:
    def step(state, batch, i):
        return state, [signs(x, i) for x in (state, batch)]

    state, batch = (-jnp.zeros((16, 3), d) for d in ("float32", "bfloat16"))
    assert_same(step, state, batch, jnp.arange(8) * 2)


@pytest.mark.parametrize(("width", "dtype"), [(6, "uint32"), (7, "uint16")])
def test_selected_rows_of_16_bits_move_in_pairs(width: int, dtype: str) -> None:
    """Bit for bit, NaN, infinities and -0.0 among them: half the bytes of 32 bits."""

    def lookup(table: jax.Array, rows: jax.Array) -> jax.Array:
        return table[rows]

    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**16, (64, width)).astype(np.uint16)
    bits[:2] = [[0x8000], [0x7F80]]  # -0.0, infinity
    rows = jnp.asarray(rng.permutation(64)[:16], jnp.int32).at[:2].set(jnp.arange(2))
    step = shardfn.fully_shard(
        lookup,
        jax.make_mesh((8,), ("data",)),
        min_size=0,
        shard={"*": {"data": 0}},
        stationary=True,
    )
    table = step.shard(jnp.asarray(bits).view("bfloat16"))
    found = np.asarray(step(table, rows)).view(np.uint16)
    np.testing.assert_array_equal(found, bits[np.asarray(rows)])
    plan = step.plan(table, rows)
    (line,) = (c for c in plan.collectives if c.op != "all_gather")
    assert line.dtype == "bfloat16"
    text = step.lower(table, rows).compile().as_text() or ""
    checked = plan.verify(text)
    assert checked.ok and checked.wire_bytes == plan.wire_bytes
    assert dtype in {c.dtype for each in checked.lines for c in each.found}
