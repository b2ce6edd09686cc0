"""Operations of the language that bring rows together which devices split: neighbours,
halves, windows and minibatches."""

import jax
import jax.numpy as jnp
from builder import Builder, Chosen, bounded
from jax import lax
from language import NARROW
from registry import along, operation

ANY = "fi" + NARROW


def _rows_of_two(b: Builder) -> Chosen:
    x = b.pick(ANY, 1, lambda v: max(v.shape) > 1)
    return [x], {"axis": b.one_of([d for d, n in enumerate(x.shape) if n > 1])}


@operation(_rows_of_two, exact=True, growth=lambda a, r: 2 * a[0].bound)
def diff(x, axis):
    return jnp.diff(x, axis=axis)


@operation(
    along(ANY, start=(0, 1, -3), stop=(-1, -2, None), step=(1, 2, 3)), exact=True
)
def span(x, axis, start, stop, step):
    n = x.shape[axis]
    places = range(n)[start:stop:step]
    if not places:
        return x
    return lax.slice_in_dim(x, places[0], places[-1] + 1, step, axis)


@operation(along(ANY, by=(1, 2, 3), back=(False, True)), exact=True)
def shift(x, axis, by, back):
    """The neighbour's row, and zeros at the end."""
    n = x.shape[axis]
    by = min(by, n)
    zeros = jnp.zeros_like(lax.slice_in_dim(x, 0, by, axis=axis))
    if back:
        return lax.concatenate([lax.slice_in_dim(x, by, n, axis=axis), zeros], axis)
    return lax.concatenate([zeros, lax.slice_in_dim(x, 0, n - by, axis=axis)], axis)


@operation(along(ANY, share=(2, 3, -2)), exact=True)
def roll_far(x, axis, share):
    """By a half, a third, or a half backwards."""
    return jnp.roll(x, x.shape[axis] // share, axis)


def _rows(b: Builder) -> Chosen:
    x = b.pick("f", 1, lambda v: v.shape[0] == b.rows > 1)
    return [x], {"by": b.one_of([1, -1, 2, -3, b.rows // 2, -(b.rows // 4)])}


@operation(_rows, exact=True, growth=lambda a, r: a[0].bound * (a[0].bound + 1))
def with_other_rows(x, by):
    """Each row times another one: a sum tells the other one, too."""
    return x * jnp.roll(x, by, 0)


def _all_axes(b: Builder) -> Chosen:
    x = b.pick(ANY, 2)
    return [x], {"shift": b.integer(-2, 2), "axes": (0, x.ndim - 1)}


@operation(_all_axes, exact=True)
def roll_both(x, shift, axes):
    return jnp.roll(x, (shift, 1), axes)


def _halved(b: Builder) -> Chosen:
    x = b.pick(ANY, 1, lambda v: any(n % 2 == 0 for n in v.shape))
    return [x], {
        "axis": b.one_of([d for d, n in enumerate(x.shape) if n % 2 == 0]),
        "how": b.one_of(["swap", "add", "interleave"]),
    }


@operation(_halved, exact=True, growth=lambda a, r: 2 * a[0].bound)
def halves(x, axis, how):
    one, two = jnp.split(x, 2, axis)
    if how == "swap":
        return jnp.concatenate([two, one], axis)
    if how == "add":
        return one + two
    return jnp.stack([one, two], axis + 1).reshape(x.shape)


@operation(
    along("f", size=(2, 3), stride=(1, 2), same=(False, True)),
    exact=True,
    growth=lambda a, r: 3 * a[0].bound,
)
def window(x, axis, size, stride, same):
    size = min(size, x.shape[axis])
    dims = [size if d == axis else 1 for d in range(x.ndim)]
    strides = [stride if d == axis else 1 for d in range(x.ndim)]
    padding = "SAME" if same else "VALID"
    return lax.reduce_window(x, 0.0, lax.add, dims, strides, padding)


@operation(
    along(ANY, lo=(-1, 0, 2), hi=(-1, 0, 2), mode=("zeros", "edge", "wrap")), exact=True
)
def pad_rows(x, axis, lo, hi, mode):
    if x.shape[axis] < 3:
        return x
    if mode == "zeros":
        config = [(lo, hi, 0) if d == axis else (0, 0, 0) for d in range(x.ndim)]
        return lax.pad(x, jnp.zeros((), x.dtype), config)
    width = [(max(lo, 0), max(hi, 0)) if d == axis else (0, 0) for d in range(x.ndim)]
    return jnp.pad(x, width, mode=mode)


def _grouped(b: Builder) -> Chosen:
    x = b.pick("f", 1, lambda v: v.shape[0] > 1)
    n = x.shape[0]
    ways = ["mean", "center", "softmax"]
    return [x], {
        "count": b.one_of([k for k in range(2, n + 1) if n % k == 0]),
        "how": b.one_of(ways),
    }


@operation(_grouped, growth=bounded(64))
def minibatches(x, count, how):
    """Rows in groups, `(k, B // k)`, and something along the groups."""
    groups = x.reshape(count, -1, *x.shape[1:])
    if how == "mean":
        return groups.mean(1)
    if how == "center":
        return (groups - groups.mean(1, keepdims=True)).reshape(x.shape)
    if how == "swap":
        return groups.swapaxes(0, 1).reshape(x.shape)
    if how == "softmax":
        return jax.nn.softmax(groups, 1).reshape(x.shape)
    if how == "sum":
        return groups.sum(0)
    if how == "last":
        return groups[:, -1]
    return jnp.roll(groups, 1, 1).reshape(x.shape)


def _exact_groups(b: Builder) -> Chosen:
    x = b.pick(ANY, 1, lambda v: v.shape[0] > 1)
    n = x.shape[0]
    return [x], {
        "count": b.one_of([k for k in range(2, n + 1) if n % k == 0]),
        "how": b.one_of(["swap", "roll", "sum", "last"]),
    }


@operation(_exact_groups, exact=True, growth=lambda a, r: 16 * a[0].bound)
def groups(x, count, how):
    return minibatches(x, count, how)
