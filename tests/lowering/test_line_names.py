"""In: small steps on abstract arguments. Out: each collective of the program that JAX
is given carries the name of its line in the plan, with the line's size.
"""

import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from plan_helpers import Sharded, cpu_mesh, shard_fn, shard_gpt, walk
from programs import gpt

from shardfn._core.line_names import phase_in

pytestmark = pytest.mark.standard_promotion

SMALL = dict(vocab=64, length=16, width=32, hidden=64, dtype=jnp.bfloat16)


def emitted_names(sharded: Sharded) -> Counter[tuple[str, int]]:
    """Runs per step by line name and elements of the larger side."""
    found: Counter[tuple[str, int]] = Counter()
    for eqn, times, _ in walk(sharded.jaxpr):
        names = re.findall(r"shardfn[\d.]+", str(eqn.source_info.name_stack))
        if re.match("all_gather|reduce_scatter|psum|all_to_all", eqn.primitive.name):
            (name,) = names
            sizes = (math.prod(a.aval.shape) for a in (*eqn.invars, *eqn.outvars))
            found[name, max(sizes)] += times
    return found


@pytest.mark.parametrize("sizes", [(8,), (2, 4)])
@pytest.mark.parametrize("shape", [dict(scan=True, remat=True, layers=3), dict()])
def test_each_collective_carries_its_lines_name(sizes, shape) -> None:
    sharded = shard_gpt(
        gpt.Config(**SMALL, **shape), cpu_mesh(*sizes), rows=8, min_size=256
    )
    lines = sharded.plan.collectives
    assert len({line.name for line in lines}) == len(lines) > 10
    assert emitted_names(sharded) == {
        (line.name, line.elements): line.times for line in lines
    }


def test_padding_counts_as_elements() -> None:
    def step(state, batch):
        return state, batch @ state

    sharded = shard_fn(step, cpu_mesh(8), (30, 999), (8, 30))
    (line,) = sharded.plan.collectives
    assert line.elements == 30 * 1000
    assert emitted_names(sharded) == {(line.name, line.elements): 1}


def test_matmuls_carry_their_pass_whatever_scopes_are_called() -> None:
    """Of a network in a checkpoint, and of one applied after its gradient."""

    def step(w, x):
        def loss(w):
            with jax.named_scope("transpose(x)"):
                return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)

        grads = jax.grad(jax.checkpoint(loss))(w)
        return w - grads @ grads, loss(w)

    text = shard_fn(step, cpu_mesh(8), (16, 16), (8, 16)).compile().as_text()
    names = set(re.findall(r'op_name="([^"]*dot_general)"', text))
    phases = {phase_in(name): name for name in names}
    assert {*phases} == {"forward", "repeated", "backward", "update"}
    assert "rematted_computation" in phases["repeated"]
    assert "jvp" not in phases["forward"] and "transpose(x)" in phases["forward"]
