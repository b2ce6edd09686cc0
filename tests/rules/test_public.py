"""In: primitives that shardfn does not know, and rules made of public names alone. Out:
the numbers of the plain step, and the collectives that the rules say.
"""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

import shardfn
from shardfn import rules
from shardfn.testing import assert_parity

MESH = jax.make_mesh((8,), ("data",))
X = jnp.arange(96.0).reshape(16, 6) % 7
TABLE = jnp.arange(60.0).reshape(10, 6) % 5


def primitive(name: str, run: Callable[..., Any]) -> Primitive:
    """A primitive that computes what `run` does."""
    made = Primitive(name)

    @made.def_abstract_eval
    def _(*avals: Any, **params: Any) -> Any:
        out = jax.eval_shape(lambda *xs: run(*xs, **params), *avals)
        return avals[0].update(shape=out.shape, dtype=out.dtype)

    mlir.register_lowering(made, mlir.lower_fun(run, multiple_results=False))
    return made


clip_p = primitive("soft_clip", lambda x, low: jnp.maximum(x, low) / 2)
order_p = primitive("order_columns", lambda x: jnp.sort(x, axis=-1)[:, ::2])
near_p = primitive("distances", lambda x, y: jnp.square(x[:, None] - y).sum(-1))


def number(x: jax.Array, *, start: int | jax.Array) -> jax.Array:
    return x + (start + jnp.arange(x.shape[0])[:, None]).astype(x.dtype)


rows_p = Primitive("number_rows")
rows_p.def_abstract_eval(lambda x, *, start: x)
mlir.register_lowering(rows_p, mlir.lower_fun(number, multiple_results=False))
stack_p = primitive("any_rank", lambda x: jnp.stack([x, -x]))


@rules.register_rule(clip_p)
def _clip(eqn):
    return rules.elementwise_rule(eqn)


@rules.register_rule(order_p)
def _order(eqn):
    return rules.partly_changed(eqn, [False, True])


@rules.register_rule(near_p)
def _near(eqn):
    b, n, d = rules.factor_names(3)
    return rules.make_rule(eqn, [[b, d], [n, d]], [[b, n]], reduce=[d])


def _rows_here(op: rules.LocalOp, x: jax.Array) -> Any:
    return [number(x, start=op.eqn.params["start"] + op.start("a"))]


@rules.register_rule(rows_p, local=_rows_here)
def _rows(eqn) -> rules.OpShardingRule:
    return rules.make_rule(eqn, ["ab"], ["ab"])


@rules.register_rule(stack_p)
def _stack(eqn):
    names = rules.fresh_names()
    new, *own = (next(names) for _ in eqn.outvars[0].aval.shape)
    return rules.make_rule(eqn, [own], [[new, *own]], linear="each")


@pytest.mark.parametrize(
    "run, rule, gathered",
    [
        (lambda t, x: clip_p.bind(x, x.max(1, keepdims=True)), "a b, a c -> a b", []),
        (lambda t, x: order_p.bind(x), "a b -> a c  whole={b, c}", []),
        (lambda t, x: near_p.bind(x, t), "a c, b c -> a b  reduce={c}", [(10, 6)]),
        (lambda t, x: rows_p.bind(x, start=3), "a b -> a b", []),
        (lambda t, x: stack_p.bind(x)[0], "b c -> a b c", []),
    ],
    ids=["elementwise", "partly_changed", "make_rule", "local", "fresh_names"],
)
def test_rules_of_new_primitives(run, rule, gathered) -> None:
    def step(table, x):
        return table + 1, run(table, x)

    eqns = jax.make_jaxpr(run)(TABLE, X).eqns
    (found,) = (rules.rule_of(e) for e in eqns if e.primitive in REGISTERED)
    assert str(found) == rule
    sharded = shardfn.fully_shard(step, MESH, min_size=0, strict=True)
    plan = sharded.plan(TABLE, X)
    assert [c.shape for c in plan.collectives if c.op == "all_gather"] == gathered
    assert_parity(step, MESH, TABLE, X, strict=True)
    np.testing.assert_array_equal(sharded(TABLE, X)[1], jax.jit(step)(TABLE, X)[1])


REGISTERED = {clip_p, order_p, near_p, rows_p, stack_p}


def test_this_file_uses_public_names_alone() -> None:
    names = [
        f"{getattr(node, 'module', '')}.{alias.name}"
        for node in ast.walk(ast.parse(Path(__file__).read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    ]
    assert not [n for n in names if n.startswith("shardfn") and "._" in n]
