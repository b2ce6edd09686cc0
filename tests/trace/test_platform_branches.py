"""In: steps with code for several platforms. Out: programs and plans of the code that
JAX lowers for the platform of the devices.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from sharded_and_plain import make_mesh

import shardfn
from shardfn._trace.jaxpr_to_program import make_program
from shardfn.testing import assert_parity

STATE = {"a": jnp.ones((64, 64)) / 64, "b": jnp.ones((64, 64)) / 32}
X = jnp.ones((8, 64))


def by_platform(x, weights):
    return lax.platform_dependent(
        x,
        weights["a"],
        weights["b"],
        cpu=lambda x, a, b: jnp.tanh(x @ a),
        cuda=lambda x, a, b: jnp.sin(x @ b),
        rocm=lambda x, a, b: jnp.cos(x @ b),
        default=lambda x, a, b: jnp.exp(x @ a @ b),
    )


def of_layers(x, weights):
    return lax.scan(lambda h, _: (by_platform(h, weights), None), x, length=3)[0]


def trainer(layers):
    def train_step(state, x):
        value, grads = jax.value_and_grad(lambda w: (layers(x, w) ** 2).mean())(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), value

    return train_step


@pytest.mark.parametrize("layers", [by_platform, of_layers, jax.checkpoint(of_layers)])
def test_moves_are_those_of_the_platform(layers) -> None:
    step, mesh = trainer(layers), make_mesh("4")
    sharded = shardfn.fully_shard(step, mesh, min_size=0, stationary=False)
    plan = sharded.plan(STATE, X)
    assert {c.path for c in plan.collectives if c.phase == "forward"} >= {"a"}
    assert "b" not in {c.path for c in plan.collectives}
    checked = plan.verify(sharded.lower(STATE, X).compile())
    assert checked.ok, str(checked)
    assert_parity(step, mesh, STATE, X, stationary=False, verify="error")


def kinds(platform: str) -> set[str]:
    """The operations of a program, and of the branches of its conditions."""
    program = make_program(jax.make_jaxpr(by_platform)(X, STATE), platform=platform)
    found = {node.eqn.primitive.name for node in program.nodes}
    bodies = [body for node in program.nodes for body in node.bodies]
    return found | {node.eqn.primitive.name for body in bodies for node in body.nodes}


@pytest.mark.parametrize(
    "platform, expected",
    [("cpu", {"tanh"}), ("cuda", {"sin"}), ("rocm", {"cos"}), ("tpu", {"exp"})],
)
def test_the_branch_of_a_platform(platform, expected) -> None:
    assert kinds(platform) == {"dot_general", *expected}


@pytest.mark.parametrize("platform", ["", "gpu"])
def test_all_branches_where_that_is_not_known(platform) -> None:
    """Devices do not say whose GPUs they are, and here that matters."""
    every = {"tanh", "sin", "cos", "exp", "dot_general"}
    assert kinds(platform) == {"platform_index", "cond", *every}


def test_gpus_whose_code_is_the_same() -> None:
    def step(x):
        return lax.platform_dependent(x, cuda=jnp.sin, rocm=jnp.cos, default=jnp.exp)

    def same(x):
        return lax.platform_dependent(x, tpu=jnp.sin, default=jnp.exp)

    names = [
        {n.eqn.primitive.name for n in make_program(made, platform="gpu").nodes}
        for made in (jax.make_jaxpr(step)(X), jax.make_jaxpr(same)(X))
    ]
    assert names == [{"platform_index", "cond"}, {"exp"}]
