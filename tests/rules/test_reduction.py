"""Rules of reductions, cumulative and windowed."""

import re
from pathlib import Path
from textwrap import dedent

import jax
import jax.numpy as jnp
import numpy as np
from harness import integers
from jax import lax
from table import Row, table

from shardfn._core.rule_registry import _registry
from shardfn.rules import reduction

CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"

EACH = ({0},)
BOOL = integers((8, 5), seed=4) > -3
INTS = integers((8, 5), jnp.int32)
COMPLEX = (integers((8, 5)) + 1j * integers((8, 5), seed=1)).astype(np.complex64)


@table(
    Row(lambda x: x.sum(1), ((8, 5),), "a b -> a  reduce={b}", EACH),
    Row(lambda x: x.sum(0), ((8, 5),), "a b -> b  reduce={a}", EACH),
    Row(lambda x: x.sum(), ((8, 5),), "a b ->   reduce={a, b}", EACH, flat=True),
    Row(lambda x: x.max(0), ((8, 5),), "a b -> b  reduce={a:max}"),
    Row(lambda x: x.max(), ((6, 5),), "a b ->   reduce={a:max, b:max}", flat=True),
    Row(lambda x: x.min(1), ((8, 5),), "a b -> a  reduce={b:min}"),
    Row(lambda x: x.prod(1), ((8, 5),), "a b -> a  reduce={b:prod}"),
    Row(lambda x: x.max(1), (INTS,), "a b -> a  reduce={b:max}"),
    Row(lambda x: x.sum(0), (INTS,), "a b -> b  reduce={a}", EACH),
    Row(lambda x: x.sum(0), (COMPLEX,), "a b -> b  reduce={a}", EACH),
    Row(lambda x: x.any(1), (BOOL,), "a b -> a  reduce={b:or}"),
    Row(lambda x: x.all(0), (BOOL,), "a b -> b  reduce={a:and}"),
    Row(lambda x: x.any(), (BOOL,), "a b ->   reduce={a:or, b:or}", flat=True),
    Row(
        lambda x: lax.reduce_and(x, (1,)),
        (INTS,),
        "a b -> a  whole={b}",
    ),
    Row(lambda x: lax.reduce_xor(x, (0,)), (INTS,), "a b -> b  whole={a}"),
    Row(lambda x: lax.argmax(x, 1, jnp.int32), ((8, 5),), "a b -> a  whole={b}"),
    Row(lambda x: lax.argmin(x, 0, jnp.int32), ((8, 5),), "a b -> b  whole={a}"),
    Row(
        lambda x: lax.reduce(x, np.float32(1), lambda a, b: a * b + a, (1,)),
        ((8, 5),),
        "a b,  -> a  whole={b}",
        uncounted=(1,),
    ),
    Row(lambda x: lax.cumsum(x, 1), ((8, 4),), "a b -> a b  whole={b}", EACH),
    Row(lambda x: lax.cumprod(x, 0), ((8, 5),), "a b -> a b  whole={a}"),
    Row(lambda x: lax.cummax(x, 0), ((8, 5),), "a b -> a b  whole={a}"),
    Row(lambda x: lax.cummin(x, 1, reverse=True), ((6, 4),), "a b -> a b  whole={b}"),
    Row(
        lambda x: lax.cumlogsumexp(x, 1), ((6, 4),), "a b -> a b  whole={b}", rtol=1e-6
    ),
)
def test_reduction_rule(row):
    row.check()


def test_the_rule_that_contributors_are_shown(monkeypatch) -> None:
    """It passes the line of a table that they are shown."""
    blocks = re.findall(
        r"^ +```python\n(.*?)^ +```", CONTRIBUTING.read_text(), re.M | re.S
    )
    rule, row = map(dedent, blocks[:2])
    names = {**vars(reduction), "lax": lax, "Row": Row}
    monkeypatch.delitem(_registry, lax.cumsum_p)
    exec(rule, names)
    assert _registry[lax.cumsum_p]
    eval(row, names).check()


def window(init, op, **params):
    size = {"window_dimensions": (1, 2), "window_strides": (1, 2), "padding": "VALID"}
    return lambda x: lax.reduce_window(x, np.float32(init), op, **(size | params))


def pooled(x):
    return window(-np.inf, lax.max)(x)


def pooled_gradient(x):
    return jax.grad(lambda x: (pooled(x) * integers((5, 4), seed=1)).sum())(x)


def pooled_tangent(x, t):
    return jax.jvp(pooled, (x,), (t,))[1]


@table(
    Row(window(0, lax.add), ((5, 8),), "a b -> a c  whole={b, c}", EACH),
    Row(window(-np.inf, lax.max), ((5, 8),), "a b -> a c  whole={b, c}"),
    Row(window(np.inf, lax.min), ((8, 6),), "a b -> a c  whole={b, c}"),
    Row(
        window(0, lax.add, padding=((1, 0), (0, 0))),
        ((5, 8),),
        "a b -> c d  whole={a, b, c, d}",
        EACH,
    ),
    Row(
        window(0, lax.add, base_dilation=(2, 1)),
        ((5, 8),),
        "a b -> c d  whole={a, b, c, d}",
        EACH,
    ),
    Row(
        window(1, lambda a, b: a * b + a),
        ((5, 8),),
        "a b,  -> a c  whole={b, c}",
        name="reduce_window",
        uncounted=(1,),
    ),
    Row(
        pooled_gradient,
        ((5, 8),),
        "a c, a b -> a b  whole={b, c}",
        EACH,
        name="select_and_scatter_add",
    ),
    Row(
        pooled_tangent,
        ((5, 8), (5, 8)),
        "a b, a b -> a c  whole={b, c}",
        EACH,
        name="select_and_gather_add",
    ),
)
def test_window_rule(row):
    row.check()


def test_select_and_scatter_rule():
    def scatter(operand, source, init):
        ge, add = (
            jax.make_jaxpr(op)(np.float32(0), np.float32(0)) for op in (lax.ge, lax.add)
        )
        return lax.select_and_scatter_p.bind(
            operand,
            source,
            init,
            select_jaxpr=ge.jaxpr,
            select_consts=(),
            scatter_jaxpr=add.jaxpr,
            scatter_consts=(),
            window_dimensions=(1, 2),
            window_strides=(1, 2),
            padding=((0, 0), (0, 0)),
        )

    Row(
        scatter,
        ((5, 8), (5, 4), ()),
        "a b, a c,  -> a b  whole={b, c}",
    ).check()
