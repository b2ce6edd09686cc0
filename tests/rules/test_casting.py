"""Rules of ops that reinterpret, annotate or move their operand."""

import jax
import jax.numpy as jnp
import numpy as np
from harness import equation_of, integers
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P
from table import Row, table

from shardfn._core.rule_registry import LocalOp, rule_of, run_local


@table(
    Row(
        lambda x: lax.bitcast_convert_type(x, jnp.int32),
        ((8, 5),),
        "a b -> a b",
        flat=True,
    ),
    Row(
        lambda x: lax.bitcast_convert_type(x, jnp.uint8),
        ((8, 5),),
        "a b -> a b c  whole={c}",
    ),
    Row(
        lambda x: lax.bitcast_convert_type(x, jnp.float32),
        (integers((5, 4), jnp.uint8),),
        "a b -> a  whole={b}",
    ),
    Row(jax.device_put, ((8, 5),), "a b -> a b", ({0},), flat=True),
)
def test_cast_rule(row):
    row.check()


def test_device_put_moves_blocks_to_host_memory():
    eqn, (x,) = equation_of(
        lambda x: jax.device_put(x, jax.memory.Space.Host), integers((8, 5))
    )
    op = LocalOp(eqn, rule_of(eqn), (("a", ("data",), 4),), ((2, 5),))
    jaxpr = jax.make_jaxpr(lambda x: run_local(op, x))(x[:2])
    assert "host" in str(jaxpr).lower()


def _constrained(spec):
    """The specs that reach XLA inside a map over `data`, `model` left automatic."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), (jax.sharding.AxisType.Auto,) * 2)
    eqn, (x,) = equation_of(
        lambda x: lax.with_sharding_constraint(x, NamedSharding(mesh, spec)),
        integers((8, 6)),
    )
    assert str(rule_of(eqn)) == "a b -> a b"
    op = LocalOp(eqn, rule_of(eqn), (("a", ("data",), 4),), ((2, 6),))
    body = jax.shard_map(
        lambda x: run_local(op, x)[0],
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        axis_names={"data"},
    )
    (mapped,) = jax.make_jaxpr(body)(x).eqns
    assert (np.asarray(jax.jit(body)(x)) == x).all()
    eqns = mapped.params["jaxpr"].eqns
    return [e.params["sharding"].spec for e in eqns if e.primitive is eqn.primitive]


def test_a_constraint_keeps_its_automatic_axes():
    assert _constrained(P("data", "model")) == [P(None, "model")]
    assert _constrained(P(("data", "model"))) == [P("model")]
    assert _constrained(P(P.UNCONSTRAINED, "model")) == [P(P.UNCONSTRAINED, "model")]
    assert _constrained(P("data")) == []
