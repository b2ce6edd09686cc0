"""Collectives read back from compiled programs, and from each notation of HLO text."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from compilers import aot
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from shardfn.analysis import targets
from shardfn.analysis._hlo import (
    HloCollective,
    overlapped_bytes,
    read_collectives,
    tally,
    wire_bytes,
)

H100, V5E = "h100:8", "tpu:v5e:2x4"


def mesh_of(target: str, names: tuple[str, ...], shape: tuple[int, ...]) -> Mesh:
    if target == "cpu":
        return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))
    return targets.mesh(target, names, shape)


def collectives_of(
    target: str,
    local: Callable,
    arguments: list[tuple[tuple[int, ...], object, P]],
    results: object,
    mesh: tuple[tuple[str, ...], tuple[int, ...]] = (("data",), (8,)),
) -> tuple[HloCollective, ...]:
    """Those of `shard_map(local)` on abstract arguments `(shape, dtype, spec)`."""
    where = mesh_of(target, *mesh)
    step = jax.shard_map(
        local, mesh=where, in_specs=tuple(s for *_, s in arguments), out_specs=results
    )
    abstract = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(where, spec))
        for shape, dtype, spec in arguments
    ]
    return read_collectives(jax.jit(step).lower(*abstract).compile().as_text())


def gather(shard: jax.Array, axis: int = 0) -> jax.Array:
    return lax.all_gather(shard, "data", axis=axis, tiled=True)


# A gradient step of 6 scanned layers `relu(h @ w1) @ w2`, weights gathered in the body
# and kept for the backward pass, whose gradients `all_gather` transposes to scatters.
LAYERS, WIDTH, HIDDEN, ROWS = 6, 512, 1024, 1024
ELEMENTS = WIDTH * HIDDEN


def mlp_step(w1: jax.Array, w2: jax.Array, x: jax.Array):
    def loss(weights, x):
        def layer(h, weights):
            w1, w2 = weights
            return jax.nn.relu(h @ gather(w1)) @ gather(w2), None

        h, _ = lax.scan(layer, x, weights)
        return jnp.sum(h.astype(jnp.float32) ** 2)

    value, (g1, g2) = jax.value_and_grad(loss)((w1, w2), x)
    return lax.psum(value, "data"), w1 - g1, w2 - g2


def mlp_collectives(target: str, dtype: object) -> tuple[HloCollective, ...]:
    stacked = P(None, "data")
    return collectives_of(
        target,
        mlp_step,
        [
            ((LAYERS, WIDTH, HIDDEN), dtype, stacked),
            ((LAYERS, HIDDEN, WIDTH), dtype, stacked),
            ((ROWS, WIDTH), dtype, P("data")),
        ],
        (P(), stacked, stacked),
    )


@pytest.mark.parametrize(
    "target, dtype, gathered, scattered",
    [
        # The CPU backend moves bfloat16 as float32.
        ("cpu", jnp.float32, "float32", "float32"),
        ("cpu", jnp.bfloat16, "float32", "float32"),
        aot(H100, jnp.float32, "float32", "float32"),
        aot(H100, jnp.bfloat16, "bfloat16", "bfloat16"),
        # The TPU rounds operands of a float32 dot to bfloat16, before it gathers them.
        aot(V5E, jnp.float32, "bfloat16", "float32"),
        aot(V5E, jnp.bfloat16, "bfloat16", "bfloat16"),
    ],
)
def test_scanned_mlp(target, dtype, gathered, scattered):
    found = mlp_collectives(target, dtype)
    assert tally(found) == {
        ("all_gather", gathered, ELEMENTS, 8): 2 * LAYERS,
        ("psum_scatter", scattered, ELEMENTS, 8): 2 * LAYERS,
        ("all_reduce", "float32", 1, 8): 1,
    }
    assert all(c.exact for c in found)
    assert {c.groups for c in found} == {(tuple(range(8)),)}
    per_layer = jnp.dtype(gathered).itemsize + jnp.dtype(scattered).itemsize
    sent = LAYERS * 2 * ELEMENTS * per_layer * 7 // 8
    assert wire_bytes(found) == sent + 2 * 4 * 7 // 8
    assert overlapped_bytes(found) < wire_bytes(found)
    forward = "jit(mlp_step)/shard_map/jvp()/while/body/"
    names = {c.op_name for c in found if c.op == "all_gather"}
    assert all(n.startswith(forward) and n.endswith("/all_gather") for n in names)


@pytest.mark.parametrize("target", ["cpu", aot(H100), aot(V5E)])
def test_overlap_is_seen_where_a_matmul_runs_meanwhile(target):
    """The gather of w2 has nothing to do with the first product."""

    def local(x, w1, w2):
        return (x @ gather(w1)) @ gather(w2)

    bf16 = jnp.bfloat16
    found = collectives_of(
        target,
        local,
        [
            ((8192, 4096), bf16, P("data")),
            ((4096, 4096), bf16, P("data")),
            ((4096, 4096), bf16, P("data")),
        ],
        P("data"),
    )
    one = 4096 * 4096 * 2 * 7 // 8
    dtypes = {c.dtype for c in found}
    if target == "cpu":
        assert dtypes == {"float32"}
        assert (wire_bytes(found), overlapped_bytes(found)) == (4 * one, 0)
    else:
        assert dtypes == {"bfloat16"}
        assert (wire_bytes(found), overlapped_bytes(found)) == (2 * one, one)


@pytest.mark.parametrize("target", ["cpu", aot(H100), aot(V5E)])
def test_hybrid_mesh_tells_the_axes_apart(target):
    def local(w, x):
        scattered = lax.psum_scatter(x @ gather(w), "data", tiled=True)
        return (
            lax.psum(scattered, "replica"),
            lax.ppermute(scattered, "data", [(i, (i + 1) % 4) for i in range(4)]),
            lax.all_to_all(x, "data", 1, 0, tiled=True),
            lax.pmax(jnp.max(x), ("replica", "data")),
        )

    both = ("replica", "data")
    found = collectives_of(
        target,
        local,
        [((512, 256), jnp.float32, P("data")), ((8192, 512), jnp.float32, P(both))],
        (P("data"), P(both), P(both), P()),
        (both, (2, 4)),
    )
    rows, cols = ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 4), (1, 5), (2, 6), (3, 7))
    seen = {(c.op, c.elements, c.times): c for c in found}
    assert {key: c.groups for key, c in seen.items()} == {
        ("all_gather", 512 * 256, 1): rows,
        ("psum_scatter", 1024 * 256, 1): rows,
        ("all_reduce", 256 * 256, 1): cols,
        ("ppermute", 256 * 256, 1): rows,
        ("all_to_all", 1024 * 512, 1): rows,
        ("all_reduce", 1, 1): (tuple(range(8)),),
    }
    float_bytes = {op: c.wire_bytes for (op, *_), c in seen.items() if c.bytes > 4}
    gathered = seen["all_gather", 512 * 256, 1]
    assert float_bytes == {
        "all_gather": gathered.bytes * 3 // 4,
        "psum_scatter": 1024 * 256 * 4 * 3 // 4,
        "all_reduce": 2 * 256 * 256 * 4 * 1 // 2,
        "ppermute": 256 * 256 * 4,
        "all_to_all": seen["all_to_all", 1024 * 512, 1].bytes * 3 // 4,
    }


@pytest.mark.parametrize(
    "target, expected",
    [
        ("cpu", [("all_reduce", "float32", 1024, 6)] * 6),
        # The GPU compiler concatenates small all-reduces into one array.
        aot(H100, [("all_reduce", "float32", 6 * 1024, 1)]),
        aot(V5E, [("all_reduce", "float32", 1024, 6)] * 6),
    ],
)
def test_combined_all_reduces(target, expected):
    def local(x):
        return [lax.psum(jnp.sin(row), "data") for row in x]

    found = collectives_of(
        target, local, [((6, 8192), jnp.float32, P(None, "data"))], [P()] * 6
    )
    assert [(c.op, c.dtype, c.elements, c.combined) for c in found] == expected
    assert sum(c.bytes for c in found) == 6 * 1024 * 4


@pytest.mark.parametrize("target", ["cpu", aot(H100), aot(V5E)])
def test_loops_multiply_and_unbounded_loops_say_so(target):
    def varying(h):
        return lax.pcast(h, "data", to="varying")

    def local(w, x):
        def inner(h, _):
            return varying(lax.psum(jnp.sin(h @ w), "data")), None

        def outer(h, _):
            return lax.scan(inner, varying(lax.psum(jnp.cos(h), "data")), None, 3)

        h, _ = lax.scan(outer, x, None, 5)
        return lax.while_loop(
            lambda h: lax.pmax(jnp.max(h), "data") < 9, lambda h: h + 1, h
        )

    found = collectives_of(
        target,
        local,
        [((128, 128), jnp.float32, P()), ((8, 128), jnp.float32, P("data"))],
        P("data"),
    )
    runs = sorted((c.reduces, c.times, c.exact) for c in found)
    assert runs == [("max", 1, False), ("sum", 5, True), ("sum", 15, True)]
