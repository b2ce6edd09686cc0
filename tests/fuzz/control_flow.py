"""Control flow of the language: each draws bodies of its own."""

from typing import Any

import jax
import jax.numpy as jnp
from builder import Builder, Chosen, NotPossible, Value, bounded
from jax import lax
from language import NARROW, Type
from registry import operation

SMALL = bounded(64)


def some(b: Builder, count: int, **kwargs: Any) -> list[Value]:
    dtypes = "fib" + NARROW
    return [b.pick(dtypes, **kwargs) for _ in range(b.integer(0, count))]


def _row(v: Value) -> Value:
    return Value(v.name, Type(v.shape[1:], v.type.dtype), v.exact, v.bound)


def _scan(b: Builder) -> Chosen:
    carry = [b.pick() for _ in range(b.integer(1, 2))]
    xs = [b.pick("fik" + NARROW, 1, lambda v: v.shape[0] <= 36)]
    if not b.depth and b.boolean():
        xs = [b.param(b.integer(2, 5), b.size(), b.size())]
    xs += [
        b.pick("fi" + NARROW, 1, lambda v: v.shape[0] == xs[0].shape[0])
        for _ in range(b.integer(0, 1))
    ]
    consts = some(b, 2)
    args = [*consts, *carry, *xs]
    exact = all(v.exact for v in carry)
    inner = [
        Value(v.name, v.type, v.exact and (exact or v not in carry), v.bound)
        for v in (*consts, *carry)
    ]
    block, exacts, _ = b.body(
        [*inner, *map(_row, xs)],
        [v.type for v in carry],
        extra=b.integer(0, 1),
        only_exact=exact,
    )
    flags = [exact] * len(carry) + exacts[len(carry) :]
    params = {"consts": len(consts), "carry": len(carry), "reverse": b.boolean()}
    return args, params | {"bodies": [(block, flags)]}


@operation(_scan, exact=True, growth=SMALL)
def scan(*args, consts, carry, reverse, bodies):
    first = consts + carry

    def one(c, x):
        out = bodies[0](*args[:consts], *c, *x)
        return tuple(out[:carry]), tuple(out[carry:])

    c, ys = lax.scan(
        one, tuple(args[consts:first]), tuple(args[first:]), reverse=reverse
    )
    return *c, *ys


def _layers(b: Builder) -> Chosen:
    """A scan over layers: each multiplies what it carries by its weights."""
    x = b.pick(ndim=1)
    weights = b.param(b.integer(2, 5), x.shape[-1], x.shape[-1])
    others = some(b, 1)
    block, _, _ = b.body(
        [*others, x, _row(weights)],
        [x.type],
        only_exact=x.exact,
        first=("dense", [len(others), len(others) + 1]),
    )
    params = {"consts": len(others), "carry": 1, "reverse": b.boolean()}
    return [*others, x, weights], params | {"bodies": [(block, [x.exact])]}


operation(_layers, exact=True, growth=SMALL, name="layers")(scan)


def _while(b: Builder) -> Chosen:
    count, carry, consts = b.pick("i"), [b.pick()], some(b, 2)
    exact = all(v.exact for v in carry)
    block, _, _ = b.body([*consts, *carry], [v.type for v in carry], only_exact=exact)
    return [count, *consts, *carry], {"bodies": [(block, [exact])]}


@operation(_while, exact=True, growth=SMALL)
def while_(count, *args, bodies):
    """Runs the body as often as `count` says, up to three times; no gradient."""
    consts, carry = map(lax.stop_gradient, args[:-1]), lax.stop_gradient(args[-1])
    consts, limit = list(consts), jnp.max(count) % 4
    _, out = lax.while_loop(
        lambda c: c[0] < limit,
        lambda c: (c[0] + 1, bodies[0](*consts, c[1])[0]),
        (jnp.int32(0), carry),
    )
    return out


def _cond(b: Builder) -> Chosen:
    index = b.pick("ib")
    args = [b.pick(), *some(b, 2)]
    like = [args[0].type]
    count = 2 if index.type.dtype == "b" else 3
    bodies = [b.body(args, like)[:2] for _ in range(count)]
    return [index, *args], {"bodies": bodies}


@operation(_cond, exact=True, growth=SMALL)
def cond(index, *args, bodies):
    return lax.switch(jnp.max(index).astype(jnp.int32), bodies, *args)


def _vmap(b: Builder) -> Chosen:
    x = b.pick("fi" + NARROW, 1)
    axis = b.axis(x)
    others = some(b, 2)
    axes = [axis]
    inputs = [_slice(x, axis)]
    for v in others:
        same = [d for d, n in enumerate(v.shape) if n == x.shape[axis]]
        axes.append(b.one_of(same) if same and b.boolean() else None)
        inputs.append(v if axes[-1] is None else _slice(v, axes[-1]))
    block, exacts, _ = b.body(inputs, [], extra=1)
    return [x, *others], {"in_axes": tuple(axes), "bodies": [(block, exacts)]}


def _slice(v: Value, axis: int) -> Value:
    shape = v.shape[:axis] + v.shape[axis + 1 :]
    return Value(v.name, Type(shape, v.type.dtype), v.exact, v.bound)


@operation(_vmap, exact=True, growth=SMALL)
def vmap(*args, in_axes, bodies):
    return jax.vmap(bodies[0], in_axes)(*args)


def _mapped(b: Builder) -> Chosen:
    x = b.pick("fi" + NARROW, 1, lambda v: v.shape[0] <= 36)
    others = some(b, 1)
    block, exacts, _ = b.body([*others, _row(x)], [], extra=1)
    at_once = b.one_of([None, None, 2, 3])
    return [x, *others], {"at_once": at_once, "bodies": [(block, exacts)]}


@operation(_mapped, exact=True, growth=SMALL)
def map_(x, *others, at_once, bodies):
    """The body on each row, or on a few at once."""
    return lax.map(lambda row: bodies[0](*others, row)[0], x, batch_size=at_once)


def _inlined(b: Builder) -> Chosen:
    args = [b.pick(), *some(b, 3)]
    block, exacts, _ = b.body(args, [], extra=b.integer(1, 2))
    return args, {"bodies": [(block, exacts)]}


@operation(_inlined, exact=True, growth=SMALL)
def remat(*args, bodies):
    return jax.checkpoint(bodies[0])(*args)


@operation(_inlined, exact=True, growth=SMALL)
def jit(*args, bodies):
    return jax.jit(bodies[0])(*args)


def _inner_grad(b: Builder) -> Chosen:
    args, params = _inlined(b)
    ((block, _),) = params["bodies"]
    return args, {"bodies": [(block, [False])]}


@operation(_inner_grad, growth=SMALL)
def inner_grad(*args, bodies):
    """The gradient of the body's sums in its first argument."""
    return jax.grad(lambda x: sum(jnp.sum(y) for y in bodies[0](x, *args[1:])))(args[0])


def _custom(b: Builder) -> Chosen:
    x, w = b.pick(), b.pick()
    kind = b.one_of(["jvp", "vjp"])
    block, exacts, types = b.body([x, w], [x.type])
    if types != [x.type]:
        raise NotPossible
    return [x, w], {"kind": kind, "bodies": [(block, exacts)]}


@operation(_custom, exact=True, growth=SMALL)
def custom(x, w, kind, bodies):
    """The body with a derivative of its own: three times the identity."""

    def run(x, w):
        return bodies[0](x, w)[0]

    if kind == "jvp":
        f = jax.custom_jvp(run)
        f.defjvp(lambda primals, tangents: (run(*primals), 3 * tangents[0]))
    else:
        f = jax.custom_vjp(run)
        f.defvjp(
            lambda x, w: (run(x, w), w),
            lambda w, g: (3 * g, jnp.broadcast_to(g.sum(), w.shape)),
        )
    return f(x, w)
