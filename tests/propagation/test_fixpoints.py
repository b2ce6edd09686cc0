"""In: programs in which a split is handed on from value to value, one a round, far more
often than any number of rounds that could be fixed. Out: it reaches the last.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxprs_in_params
from plan_helpers import cpu_mesh

import shardfn

LINKS = 40
X = jnp.arange(64.0).reshape(16, 4)


def first_values() -> tuple[jax.Array, ...]:
    return tuple(jnp.full((16, 4), float(i)) for i in range(LINKS))


def scanned(state, x):
    def body(carry, _):
        return (x, *carry[:-1]), None

    carry, _ = lax.scan(body, first_values(), None, length=2 * LINKS)
    return state, carry[-1].sum()


def looped(state, x):
    def body(carry):
        return carry[0] + 1, x, *carry[1:-1]

    out = lax.while_loop(lambda c: c[0] < 2 * LINKS, body, (0, *first_values()))
    return state, out[-1].sum()


def straight(state, x):
    """Each product wants its second factor split once its first one is."""
    made = [jnp.sin(jnp.full((16, 4), state + i)) for i in range(LINKS)]
    out = (x * made[0]).sum()
    for a, b in zip(made, made[1:], strict=False):
        out = out + jnp.tanh(a * b).sum()
    return state, out


def shapes(jaxpr: Any) -> set[tuple[int, ...]]:
    """Of all values that a jaxpr makes, and those in it."""
    found = {v.aval.shape for eqn in jaxpr.eqns for v in eqn.outvars}
    for eqn in jaxpr.eqns:
        for inner in jaxprs_in_params(eqn.params):
            found |= shapes(getattr(inner, "jaxpr", inner))
    return found


def local_program(step: Callable, *args: Any) -> Any:
    """The jaxpr that each device runs."""
    (call,) = jax.make_jaxpr(step)(*args).jaxpr.eqns
    while call.primitive.name != "shard_map":
        (inner,) = jaxprs_in_params(call.params)
        (call,) = getattr(inner, "jaxpr", inner).eqns
    return call.params["jaxpr"]


@pytest.mark.parametrize("step", [scanned, looped, straight])
def test_a_split_reaches_the_last_link(step: Callable) -> None:
    sharded = shardfn.fully_shard(step, cpu_mesh(8), donate=False)
    expected, got = step(jnp.float32(0), X), sharded(jnp.float32(0), X)
    np.testing.assert_allclose(expected[1], got[1], rtol=1e-5)
    lines = sharded.plan(jnp.float32(0), X).collectives
    assert {(c.op, c.shape, c.times) for c in lines} == {("all_reduce", (), 1)}
    local = shapes(local_program(sharded, jnp.float32(0), X))
    assert (2, 4) in local and (16, 4) not in local
