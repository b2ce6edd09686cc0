"""Operations of the language that contract dimensions, and those with random bits."""

import jax
import jax.numpy as jnp
from builder import Builder, Chosen, NotPossible, bounded, contracted, total
from jax import lax
from registry import operation

# Contractions


def _dense(b: Builder) -> Chosen:
    x = b.pick(ndim=1)
    return [x, b.param(x.shape[-1], b.size())], {}


operation(_dense, exact=True, growth=contracted, name="dense")(jnp.matmul)


def _dot(b: Builder) -> Chosen:
    x = b.pick(ndim=1)
    d = b.axis(x)
    y = b.pick(ndim=1, test=lambda v: x.shape[d] in v.shape)
    e = b.one_of([i for i, n in enumerate(y.shape) if n == x.shape[d]])
    pairs = [
        (i, j)
        for i, n in enumerate(x.shape)
        for j, m in enumerate(y.shape)
        if n == m and i != d and j != e
    ]
    some = [b.one_of(pairs)] if pairs and b.boolean() else []
    batch = tuple(i for i, _ in some), tuple(j for _, j in some)
    return [x, y], {"dims": (((d,), (e,)), batch)}


@operation(_dot, exact=True, growth=contracted)
def dot(x, y, dims):
    return lax.dot_general(x, y, dims)


@operation(
    lambda b: (lambda x: ([x, b.pick(test=lambda y: y.shape == x.shape)], {}))(
        b.pick(ndim=2)
    ),
    growth=bounded(64),
)
def attention(x, y):
    score = jnp.einsum("...td,...sd->...ts", x, y) / 8
    return jnp.einsum("...ts,...sd->...td", jax.nn.softmax(score), x)


def _conv(b: Builder) -> Chosen:
    x = b.pick(ndim=3, test=lambda v: v.ndim == 3)
    kernel = b.param(b.integer(1, 3), x.shape[2], b.size())
    padding, stride = b.one_of(["SAME", "VALID"]), b.integer(1, 2)
    if x.shape[1] < kernel.shape[0]:
        raise NotPossible
    return [x, kernel], {"padding": padding, "stride": stride}


@operation(_conv, exact=True, growth=contracted)
def conv(x, kernel, padding, stride):
    dims = ("NHC", "HIO", "NHC")
    return lax.conv_general_dilated(
        x, kernel, (stride,), padding, dimension_numbers=dims
    )


# Random bits


def _random(b: Builder) -> Chosen:
    return [b.pick(), b.pick("k", test=lambda k: not k.ndim)], {"fold": b.integer(0, 3)}


@operation(_random, exact=True, growth=total)
def dropout(x, key, fold):
    keep = jax.random.bernoulli(jax.random.fold_in(key, fold), 0.5, x.shape)
    return jnp.where(keep, 2 * x, 0.0)


@operation(_random, growth=total)
def noise(x, key, fold):
    return x + jax.random.normal(jax.random.fold_in(key, fold), x.shape)


@operation(_random, exact=True, growth=bounded(6))
def randint(x, key, fold):
    return jax.random.randint(jax.random.fold_in(key, fold), x.shape, 0, 5)


@operation(
    lambda b: ([b.pick(ndim=1), b.pick("k", test=lambda k: not k.ndim)], {}), exact=True
)
def shuffle(x, key):
    return jax.random.permutation(key, x)


@operation(lambda b: ([b.pick("k", test=lambda k: not k.ndim)], {"n": b.integer(2, 4)}))
def split_key(key, n):
    return jax.random.split(key, n)
