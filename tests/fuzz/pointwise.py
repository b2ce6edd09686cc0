"""Operations of the language, element by element or along dimensions."""

import jax
import jax.numpy as jnp
from builder import Builder, Chosen, bounded, largest, product, summed, total
from jax import lax
from language import NARROW, Type
from registry import along, fits, one, one_exact, operation, over_some, two

ANY = "fi" + NARROW

# Elementwise

operation(two(), exact=True, growth=total, name="add")(jnp.add)
operation(two(), exact=True, growth=total, name="sub")(jnp.subtract)
operation(two(), exact=True, growth=product, name="mul")(jnp.multiply)
operation(two("i"), exact=True, growth=total, name="add_int")(jnp.add)
operation(two("i"), exact=True, growth=largest, name="min_int")(jnp.minimum)
operation(two(exact=True), jumps=True, name="maximum")(jnp.maximum)
operation(two(ANY, True), jumps=True, name="less")(jnp.less)
operation(two(ANY, True), jumps=True, name="equal")(jnp.equal)
operation(two("b"), jumps=True, name="and_")(jnp.logical_and)
operation(two("b"), jumps=True, name="xor")(jnp.logical_xor)
operation(one_exact("b"), jumps=True, name="not_")(jnp.logical_not)
operation(one(), exact=True, name="neg")(jnp.negative)
operation(one(), name="sin")(jnp.sin)
operation(one(), growth=bounded(1), name="logistic")(jax.nn.sigmoid)
operation(one(), name="softplus")(jax.nn.softplus)
operation(one(), exact=True, name="stop_gradient")(lax.stop_gradient)
operation(one_exact(), jumps=True, name="abs_")(jnp.abs)
operation(one_exact(), jumps=True, name="relu")(jax.nn.relu)
operation(one_exact(), jumps=True, name="sign")(jnp.sign)


@operation(one())
def exp(x):
    return jnp.exp(-x * x)


@operation(lambda b: ([b.pick(), b.pick(test=lambda v: not v.ndim)], {}))
def divide(x, y):
    return x / (1 + y * y)


@operation(one(), exact=True, growth=lambda a, r: a[0].bound ** 2)
def square(x):
    return x**2


@operation(one(), growth=bounded(4))
def squash(x):
    return 4 * jnp.tanh(x / 4)


@operation(one_exact("fi"), jumps=True, growth=bounded(4))
def wrap(x):
    if x.dtype == jnp.int32:
        return jnp.mod(x, 5)
    return x - 7 * jnp.round(x / 7)


@operation(one_exact("fb"), jumps=True)
def to_int(x):
    return jnp.abs(x).astype(jnp.int32) if x.dtype != jnp.bool_ else x.astype(jnp.int32)


@operation(one_exact("ib"), jumps=True)
def to_float(x):
    return x.astype(jnp.float32)


def _where(b: Builder) -> Chosen:
    (x, y), _ = two()(b)
    shape = jnp.broadcast_shapes(x.shape, y.shape)
    mask = b.pick("b", test=lambda m: fits(m.shape, shape))
    return [mask, x, y], {}


operation(_where, exact=True, name="where")(jnp.where)


@operation(
    lambda b: (lambda x: ([x], {"axis": b.axis(x)}))(b.pick(ANY, 1)),
    exact=True,
    growth=lambda a, r: a[0].bound + max(a[0].shape),
)
def add_iota(x, axis):
    return x + lax.broadcasted_iota(x.dtype, x.shape, axis)


@operation(lambda b: ([b.pick(ndim=2)], {"k": b.integer(-1, 1)}), exact=True)
def tril(x, k):
    return jnp.where(jnp.tri(*x.shape[-2:], k=k, dtype=bool), x, -8.0)


@operation(lambda b: ([b.pick(), b.pick()], {}), exact=True, growth=bounded(10**4))
def fold(x, y):
    """`x` with the sum of `y` added: makes a value of the type of `x` of both."""
    return x + y.sum()


# Along dimensions

operation(over_some("fi"), exact=True, growth=summed, name="sum_")(jnp.sum)
operation(over_some(), name="mean")(jnp.mean)
operation(over_some(), growth=bounded(10**4), name="var")(jnp.var)
operation(over_some(ANY, True), jumps=True, name="max_")(jnp.max)
operation(over_some(ANY, True), jumps=True, name="min_")(jnp.min)
operation(over_some("b"), jumps=True, name="any_")(jnp.any)
operation(over_some("b"), jumps=True, name="all_")(jnp.all)
operation(along(), growth=bounded(10), name="logsumexp")(jax.nn.logsumexp)
operation(along(), growth=bounded(1), name="softmax")(jax.nn.softmax)
operation(along(), growth=bounded(64), name="log_softmax")(jax.nn.log_softmax)
operation(along(ANY, True), jumps=True, growth=bounded(128), name="argmax")(jnp.argmax)
operation(along(ANY, True), jumps=True, name="sort")(jnp.sort)
operation(along("f", True), jumps=True, growth=bounded(128), name="argsort")(
    jnp.argsort
)
both = (False, True)
operation(
    along("fi", reverse=both),
    exact=True,
    growth=lambda a, r: a[0].bound * max(a[0].shape),
    name="cumsum",
)(lax.cumsum)
operation(along("f", True, reverse=both), jumps=True, name="cummax")(lax.cummax)
operation(along("b" + ANY), exact=True, name="flip")(jnp.flip)
operation(along(ANY, shift=(1, 2, -1)), exact=True, name="roll")(jnp.roll)


@operation(lambda b: ([b.exact(ndim=1)], {"k": b.integer(1, 3)}), jumps=True)
def top_k(x, k):
    return lax.top_k(x, min(k, x.shape[-1]))


@operation(lambda b: ([b.pick(ndim=1), b.leaf("p", Type(b.values[0].shape[-1:]))], {}))
def rms_norm(x, scale):
    scale = jnp.resize(scale, x.shape[-1:]) if scale.shape != x.shape[-1:] else scale
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1) * scale
