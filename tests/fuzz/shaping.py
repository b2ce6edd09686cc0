"""Operations of the language that move elements: shapes and indices."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from builder import Builder, Chosen, Value, bounded
from hypothesis import strategies as st
from jax import lax
from language import NARROW
from registry import along, operation, two

ANY = "fib" + NARROW

# Shapes


@operation(
    lambda b: (
        lambda x: ([x], {"permutation": tuple(b.draw(st.permutations(range(x.ndim))))})
    )(b.pick(ANY, 2)),
    exact=True,
)
def transpose(x, permutation):
    return jnp.transpose(x, permutation)


def _reshape(b: Builder) -> Chosen:
    x = b.pick(ANY, 1)
    shape, d = x.shape, b.axis(x)
    divisors = [k for k in range(1, shape[d] + 1) if shape[d] % k == 0]
    split = b.one_of(divisors)
    merged = (*shape[:d], shape[d] * (shape[d + 1 :] or (1,))[0], *shape[d + 2 :])
    ways = [merged, (*shape[:d], split, shape[d] // split, *shape[d + 1 :])]
    ways += [(-1,), (*shape[:d], 1, *shape[d:]), (shape[0], -1)]
    return [x], {"shape": b.one_of(ways)}


operation(_reshape, exact=True, name="reshape")(jnp.reshape)


def _squeeze(b: Builder) -> Chosen:
    x = b.pick(ANY, 1, lambda v: 1 in v.shape)
    return [x], {"axis": x.shape.index(1)}


operation(_squeeze, exact=True, name="squeeze")(jnp.squeeze)


@operation(lambda b: ([b.pick(ANY)], {"n": b.size()}), exact=True)
def broadcast(x, n):
    return jnp.broadcast_to(x, (n, *x.shape))


@operation(along(ANY, start=(0, 1, 2), step=(1, 2)), exact=True)
def slice_(x, axis, start, step):
    return lax.slice_in_dim(x, min(start, x.shape[axis] - 1), None, step, axis)


def _concat(b: Builder) -> Chosen:
    x = b.pick("fi" + NARROW, 1)
    d = b.axis(x)

    def same(v: Value) -> bool:
        return v.ndim == x.ndim and v.shape[:d] + v.shape[d + 1 :] == (
            x.shape[:d] + x.shape[d + 1 :]
        )

    return [x, b.pick(x.type.dtype, 1, same)], {"axis": d}


@operation(_concat, exact=True)
def concat(x, y, axis):
    return jnp.concatenate([x, y], axis)


@operation(two(), exact=True)
def stack(x, y):
    return jnp.stack(jnp.broadcast_arrays(x, y))


@operation(along(lo=(0, 1, 2, -1), hi=(0, 1, 3), interior=(0, 1)), exact=True)
def pad(x, axis, lo, hi, interior):
    lo = lo if x.shape[axis] > 1 else 0
    config = [(0, 0, 0)] * x.ndim
    config[axis] = (lo, hi, interior)
    return lax.pad(x, jnp.float32(1), config)


@operation(along(n=(2, 3)), exact=True)
def repeat(x, axis, n):
    return jnp.repeat(x, n, axis)


@operation(along(n=(2, 3)), exact=True)
def tile(x, axis, n):
    return jnp.tile(x, [n if d == axis else 1 for d in range(x.ndim)])


# Indices


def _indexed(b: Builder) -> Chosen:
    x = b.pick("f", 1)
    return [x, b.pick("i")], {"axis": b.axis(x)}


@operation(_indexed, exact=True)
def take(x, index, axis):
    return jnp.take(x, index % x.shape[axis], axis)


@operation(lambda b: ([b.param(b.size(), b.size()), b.pick("i")], {}), exact=True)
def embed(table, index):
    return table[index % table.shape[0]]


@operation(
    lambda b: (
        lambda x: ([x, b.pick("i", test=lambda i: i.shape == x.shape[:-1])], {})
    )(b.pick("f", 1)),
    exact=True,
)
def take_along(x, index):
    return jnp.take_along_axis(x, (index % x.shape[-1])[..., None], -1)


@operation(lambda b: ([b.pick("i")], {"n": b.size()}), jumps=True, growth=bounded(1))
def one_hot(index, n):
    return jax.nn.one_hot(index, n)


def _by_row(exact: bool = False) -> Callable[[Builder], Chosen]:
    """A value, an index per row of it, and into how many places they point."""

    def choose(b: Builder) -> Chosen:
        x = (b.exact if exact else b.pick)("f", 1)
        index = b.pick("i", 1, lambda i: i.shape == x.shape[:1])
        return [x, index], {"n": b.size()}

    return choose


@operation(_by_row(), exact=True, growth=lambda a, r: a[0].bound * a[0].shape[0])
def scatter_add(x, index, n):
    return jnp.zeros((n, *x.shape[1:])).at[index % n].add(x)


@operation(_indexed, exact=True, growth=lambda a, r: a[0].bound * 64)
def scatter_into(x, index, axis):
    x = jnp.moveaxis(x, axis, 0)
    return x.at[index % x.shape[0]].add(2.0)


@operation(_by_row(exact=True), jumps=True)
def scatter_max(x, index, n):
    return jnp.zeros((n, *x.shape[1:])).at[index % n].max(x)


@operation(
    lambda b: (
        lambda x: (
            [x, b.pick("i", test=lambda i: not i.ndim)],
            {"axis": b.axis(x), "size": b.integer(1, 4)},
        )
    )(b.pick("f", 1)),
    exact=True,
)
def dynamic_slice(x, index, axis, size):
    return lax.dynamic_slice_in_dim(x, index, min(size, x.shape[axis]), axis)


@operation(
    lambda b: (
        lambda x: ([x, b.pick("i", test=lambda i: not i.ndim)], {"axis": b.axis(x)})
    )(b.pick("f", 1)),
    exact=True,
)
def dynamic_update(x, index, axis):
    piece = lax.slice_in_dim(x, 0, (x.shape[axis] + 1) // 2, axis=axis)
    return lax.dynamic_update_slice_in_dim(x, -piece, index, axis)


@operation(
    lambda b: (lambda x: ([x], {"axis": b.axis(x), "at": b.integer(-2, 2)}))(
        b.pick("f", 1)
    ),
    exact=True,
)
def set_at(x, axis, at):
    at %= x.shape[axis]
    return jnp.moveaxis(x, axis, 0).at[at].set(3.0)


@operation(lambda b: ([b.pick("i")], {"n": b.size()}), jumps=True, growth=bounded(512))
def bincount(index, n):
    return jnp.zeros(n, jnp.int32).at[index.ravel() % n].add(1)
