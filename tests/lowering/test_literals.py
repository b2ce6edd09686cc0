"""In: steps whose nodes read the same literals. Out: each is an array once, cast once
to vary along the mesh axes, whatever reads it; but what waits is left as it is.
"""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, jaxprs_in_params
from plan_helpers import cpu_mesh

import shardfn
from shardfn._lowering.literals import Literals

READERS = 6
FACTOR = 2.718  # of no other literal


def casts(jaxpr: Any) -> Counter[str]:
    """The shapes of what is cast to vary along mesh axes, and how often."""
    found: Counter[str] = Counter()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("pvary", "pcast"):
            found[eqn.invars[0].aval.str_short()] += 1
        for inner in jaxprs_in_params(eqn.params):
            found += casts(inner)
    return found


def step(w: jax.Array, x: jax.Array) -> Any:
    for _ in range(READERS):
        x = jnp.tanh(x * FACTOR)
    return w - 0.1 * jax.grad(lambda w: jnp.mean(x @ w))(w), jnp.mean(x)


def arguments() -> tuple[jax.Array, jax.Array]:
    return jnp.ones((16, 16)), jnp.ones((8, 16))


def test_a_literal_is_one_constant_for_all_that_read_it() -> None:
    sharded = shardfn.fully_shard(step, cpu_mesh(8), min_size=0)
    text = sharded.lower(*arguments()).as_text()
    assert text.count("dense<2.718") == 1
    assert text.count("stablehlo.tanh") == READERS


def test_a_literal_is_cast_once() -> None:
    mesh, (w, x) = cpu_mesh(8), arguments()
    sharded = shardfn.fully_shard(step, mesh, min_size=0)
    jaxpr = jax.make_jaxpr(sharded)(sharded.shard(w), x)
    scalars = casts(jaxpr.jaxpr)["float32[]"]
    literals = {FACTOR, 0.1, 1 / 128}
    assert 0 < scalars <= len(literals)


def test_one_that_waits_is_not_replaced() -> None:
    literals, one = Literals(), Literal(2.0, jax.core.ShapedArray((), jnp.float32))
    mesh = cpu_mesh(8)

    def local(x: jax.Array) -> jax.Array:
        own = literals.array(one)
        first, _ = literals.alike((one, 0), (own, x))
        again, _ = literals.alike((one, 1), (own, x + 1))
        waits = jax.lax.optimization_barrier(own)
        left, _ = literals.alike((one, 0), (waits, x))
        assert first is again and first is not own
        assert left is waits
        return x

    spec = jax.sharding.PartitionSpec("data")
    x = jax.device_put(jnp.ones(8), jax.NamedSharding(mesh, spec))
    jax.make_jaxpr(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))(x)
