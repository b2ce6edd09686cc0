"""Operations of the language on narrow and unsigned integers.

Their sums wrap around, so they are exact in any order; those that become other numbers
are made small first. As indices they are taken as they are: too large, or negative.
"""

import jax
import jax.numpy as jnp
from builder import Builder, Chosen, bounded
from jax import lax
from language import DTYPES, INTEGERS, NARROW
from registry import along, fits, operation

SMALL = bounded(64)


@operation(
    lambda b: ([b.exact("fib" + NARROW)], {"dtype": b.one_of(NARROW)}), jumps=True
)
def to_narrow(x, dtype):
    x = x.astype(jnp.int32) if x.dtype == jnp.float32 else x
    return x.astype(DTYPES[dtype])


@operation(lambda b: ([b.pick(NARROW)], {}), jumps=True, growth=SMALL)
def narrow_to_int(x):
    return lax.rem(x, jnp.array(61, x.dtype)).astype(jnp.int32)


@operation(lambda b: ([b.pick(NARROW)], {}), jumps=True, growth=SMALL)
def narrow_to_float(x):
    return lax.rem(x, jnp.array(61, x.dtype)).astype(jnp.float32)


TWO = ("add", "sub", "mul", "min", "max", "bitwise_xor", "bitwise_and", "rem", "div")


def _two(b: Builder) -> Chosen:
    x = b.pick(NARROW)
    y = b.pick(x.type.dtype, test=lambda y: fits(x.shape, y.shape))
    return [x, y], {"how": b.one_of(TWO)}


@operation(_two, jumps=True)
def narrow_two(x, y, how):
    x, y = jnp.broadcast_arrays(x, y)
    y = y | jnp.array(1, y.dtype) if how in ("rem", "div") else y
    return getattr(lax, how)(x, y)


ONE = ("population_count", "clz", "bitwise_not", "neg", "sign")


@operation(
    lambda b: ([b.pick(NARROW)], {"how": b.one_of(ONE), "add": b.integer(0, 200)}),
    jumps=True,
)
def narrow_one(x, how, add):
    return getattr(lax, how)(x + jnp.array(add % 100, x.dtype))


@operation(
    along(NARROW, how=("sum", "max", "min", "xor", "cumsum")),
    jumps=True,
)
def narrow_along(x, axis, how):
    if how == "cumsum":
        return lax.cumsum(x, axis)
    if how == "xor":
        return lax.reduce(x, jnp.zeros((), x.dtype), lax.bitwise_xor, (axis,))
    return getattr(lax, f"reduce_{how}")(x, axes=(axis,))


def _counted(b: Builder) -> Chosen:
    x = b.pick("fi" + NARROW, 1)
    return [x], {"axis": b.axis(x), "dtype": b.one_of(INTEGERS)}


@operation(_counted, jumps=True, growth=SMALL)
def parity_of_count(x, axis, dtype):
    """Of the places along a dimension, as the dtype counts them."""
    count = lax.broadcasted_iota(DTYPES[dtype], x.shape, axis)
    return (count < lax.rem(count, jnp.array(7, count.dtype)) + 4).astype(jnp.int32)


def _dot(b: Builder) -> Chosen:
    x = b.pick("By", 2, lambda v: v.ndim == 2)
    y = b.pick(x.type.dtype, 1, lambda v: v.shape[0] == x.shape[1])
    return [x, y], {}


@operation(_dot, jumps=True, growth=bounded(10**6))
def narrow_dot(x, y):
    dims = (((1,), (0,)), ((), ()))
    return lax.dot_general(x, y, dims, preferred_element_type=jnp.int32) % 61


# Indices


def _indexed(b: Builder) -> Chosen:
    x = b.pick("f", 1)
    return [x, b.pick(INTEGERS)], {
        "axis": b.axis(x),
        "mode": b.one_of(["clip", "wrap", "fill"]),
    }


@operation(_indexed, exact=True)
def take_any(x, index, axis, mode):
    fill = {"fill_value": -3} if mode == "fill" else {}
    return jnp.take(x, index, axis, mode=mode, **fill)


@operation(_indexed, exact=True, growth=lambda a, r: a[0].bound * 64)
def add_any(x, index, axis, mode):
    x = jnp.moveaxis(x, axis, 0)
    return x.at[index].add(2.0, mode="drop" if mode == "fill" else "clip")


@operation(_indexed, exact=True)
def set_any(x, index, axis, mode):
    """Sets rows, all to the same, so that it does not matter which comes last."""
    x = jnp.moveaxis(x, axis, 0)
    return x.at[index].set(3.0, mode="drop" if mode == "fill" else "clip")


def _sliced(b: Builder) -> Chosen:
    x = b.pick("f", 1)
    index = b.pick(INTEGERS, test=lambda i: not i.ndim)
    return [x, index], {"axis": b.axis(x), "size": b.integer(1, 4)}


@operation(_sliced, exact=True)
def slice_any(x, index, axis, size):
    starts = [jnp.zeros((), index.dtype)] * x.ndim
    starts[axis] = index
    sizes = [min(size, n) if d == axis else n for d, n in enumerate(x.shape)]
    return lax.dynamic_slice(x, starts, sizes)


@operation(_sliced, exact=True)
def update_any(x, index, axis, size):
    starts = [jnp.zeros((), index.dtype)] * x.ndim
    starts[axis] = index
    piece = lax.slice_in_dim(x, 0, min(size, x.shape[axis]), axis=axis)
    return lax.dynamic_update_slice(x, -piece, starts)


def _by_place(b: Builder) -> Chosen:
    x = b.pick("f", 2)
    index = b.pick(INTEGERS, 1, lambda i: i.shape == x.shape[:1])
    return [x, index], {
        "dtype": b.one_of(INTEGERS),
        "back": b.one_of(["", "cast", "reverse"]),
    }


def _places(x, dtype, back):
    places = jnp.arange(x.shape[0], dtype=DTYPES[dtype])
    places = places.astype(jnp.int32) if back == "cast" else places
    return places[::-1] if back == "reverse" else places


@operation(_by_place, exact=True)
def at_places(x, index, dtype, back):
    """An element of each row, the rows counted in a dtype that may be too narrow."""
    rows, columns = _places(x, dtype, back), index.astype(jnp.int32) % x.shape[1]
    return x.at[rows, columns].get(mode="clip")


@operation(_by_place, exact=True, growth=lambda a, r: a[0].bound + 2 * a[0].shape[0])
def add_at_places(x, index, dtype, back):
    rows, columns = _places(x, dtype, back), index.astype(jnp.int32) % x.shape[1]
    return x.at[rows, columns].add(2.0, mode="drop")


@operation(
    lambda b: ([b.pick(INTEGERS)], {"n": b.size()}), jumps=True, growth=bounded(1)
)
def one_hot_any(index, n):
    return jax.nn.one_hot(index, n)


@operation(lambda b: ([b.pick("i" + NARROW, 1)], {}), jumps=True, growth=SMALL)
def first(x):
    """A scalar: what slices start at."""
    return x.ravel()[0]
