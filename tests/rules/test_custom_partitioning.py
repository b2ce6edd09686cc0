"""Functions that say themselves how they are partitioned: they are split like what they
are written in, which is what JAX runs of them in `shard_map`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from plan_helpers import GATHERS, cpu_mesh

import shardfn
from shardfn._core import rule_registry
from shardfn.testing import assert_parity

opaque_p = Primitive("opaque_matmul")
opaque_p.def_abstract_eval(
    lambda x, w: jax.core.ShapedArray((x.shape[0], w.shape[1]), x.dtype)
)
mlir.register_lowering(opaque_p, mlir.lower_fun(jnp.dot, multiple_results=False), "cpu")


def product(x, w):
    return x @ w


def opaque(x, w):
    return opaque_p.bind(x, w)


def partitioned(run: Any) -> Any:
    """`run`, `[B, I], [I, O] -> [B, O]`, with a partition of the rows of its own."""
    wrapped = custom_partitioning(run)

    def partition(mesh, given, result):
        return mesh, run, result.sharding, tuple(x.sharding for x in given)

    wrapped.def_partition(
        partition=partition,
        infer_sharding_from_operands=lambda mesh, given, result: given[0].sharding,
        sharding_rule="b i, i o -> b o",
    )

    @jax.custom_vjp
    def function(x, w):
        return wrapped(x, w)

    def backward(kept, ct):
        return jax.vjp(product, *kept)[1](ct)

    function.defvjp(lambda x, w: (wrapped(x, w), (x, w)), backward)
    return function


def step_of(run: Any) -> Any:
    function = partitioned(run)

    def train_step(w, x):
        loss, grads = jax.value_and_grad(lambda w: jnp.mean(function(x, w) ** 2))(w)
        return w - 0.1 * grads, loss

    return train_step


def arguments() -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0))
    return tuple(
        jax.random.normal(key, shape)
        for key, shape in zip(keys, [(24, 40), (16, 24)], strict=True)
    )


def test_rows_are_split_and_weights_are_gathered() -> None:
    step, args = step_of(product), arguments()
    plan = shardfn.fully_shard(step, cpu_mesh(8), min_size=0, **GATHERS).plan(*args)
    found = [(c.op, c.path) for c in plan.collectives if c.shape]
    assert found == [("all_gather", "state"), ("psum_scatter", "state")]
    assert_parity(step, cpu_mesh(8), *args, steps=3, min_size=0, **GATHERS)


def test_what_it_has_inside_may_still_need_a_rule() -> None:
    """A library's kernel is a primitive of its own inside."""
    step, args = step_of(opaque), arguments()
    sharded = shardfn.fully_shard(step, cpu_mesh(8), min_size=0, **GATHERS)
    with pytest.warns(shardfn.UnsupportedPrimitiveWarning, match="'opaque_matmul'"):
        sharded.plan(*args)


def test_a_rule_for_what_it_has_inside_is_used(monkeypatch) -> None:
    monkeypatch.setattr(rule_registry, "_registry", {**rule_registry._registry})

    @shardfn.register_rule(opaque_p)
    def rule(eqn):
        return shardfn.rules.make_rule(eqn, ["bi", "io"], ["bo"], reduce="i")

    step, args = step_of(opaque), arguments()
    plan = shardfn.fully_shard(step, cpu_mesh(8), min_size=0, **GATHERS).plan(*args)
    assert ("all_gather", (16, 24)) not in [(c.op, c.shape) for c in plan.collectives]
    assert_parity(step, cpu_mesh(8), *args, steps=3, min_size=0, **GATHERS)
