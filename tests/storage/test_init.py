"""In: functions that make a state. Out: the same bits on every mesh, and compiled
programs of which none holds more than the shards and the largest leaf.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from compilers import aot
from jax.sharding import NamedSharding, PartitionSpec
from sharded_and_plain import make_mesh
from tiers import tiered

import shardfn
from shardfn.analysis import targets
from shardfn.storage import _init_state
from shardfn.testing import assert_same

# Bits and memory are those of programs as users compile them.
pytestmark = [pytest.mark.standard_promotion, pytest.mark.optimized]

KEY = jax.random.key(0)
SHAPE, ODD = (128, 96), (61, 83)
MAKERS = jax.nn.initializers


def create(key: jax.Array) -> dict[str, Any]:
    """Random bits of every kind, in parts and whole, also of shapes that 8 devices do
    not divide, and moments."""
    keys = iter(jax.random.split(key, 12))
    params = {
        "normal": jax.random.normal(next(keys), SHAPE),
        "odd": MAKERS.lecun_normal()(next(keys), ODD),
        "uniform": MAKERS.glorot_uniform()(next(keys), SHAPE),
        "layers": jax.vmap(lambda k: jax.random.normal(k, SHAPE))(
            jax.random.split(next(keys), 4)
        ),
        "orthogonal": MAKERS.orthogonal()(next(keys), (64, 64)),
        "bias": jnp.zeros(96),
    }
    return {
        "params": params,
        "half": jax.random.normal(next(keys), SHAPE, jnp.bfloat16),
        "key": next(keys),
        "optimizer": optax.adam(1e-3).init(params),
    }


def orthogonal(key: jax.Array) -> list[jax.Array]:
    return [MAKERS.orthogonal()(k, (128, 128)) for k in jax.random.split(key, 3)]


def random(key: jax.Array) -> list[jax.Array]:
    makers = MAKERS.lecun_normal(), MAKERS.glorot_uniform(), jax.random.normal
    keys = jax.random.split(key, 6)
    return [makers[i % 3](k, (512, 256 + i % 2)) for i, k in enumerate(keys)]


def step_on(mesh: jax.sharding.Mesh) -> shardfn.ShardedStep:
    axis = "data" if len(mesh.axis_names) == 1 else mesh.axis_names
    return shardfn.fully_shard(lambda s, x: (s, x), mesh, axis=axis, min_size=0)


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    return jax.jit(create)(KEY)


@pytest.mark.parametrize("name", tiered(["1", "2", "4", "8", "2x4"], ["2x4"]))
def test_every_mesh_makes_the_same_bits(name, whole) -> None:
    mesh = jax.make_mesh((1,), ("data",)) if name == "1" else make_mesh(name)
    step = step_on(mesh)
    assert_same(whole, step.unshard(step.init(create, KEY)), "made", tol=0.0)


def test_leaves_that_are_made_one_after_the_other(whole, monkeypatch) -> None:
    answers = iter([3 * 10**9])
    monkeypatch.setattr(_init_state, "_temporary", lambda program: next(answers, 0))
    monkeypatch.setattr(_init_state, "INIT_BYTES", 10**9)
    compiled = _init_state.programs
    counts = []

    def counted(*args):
        for chosen, program in compiled(*args):
            counts.append(len(chosen))
            yield chosen, program

    monkeypatch.setattr(_init_state, "programs", counted)
    step = step_on(make_mesh("8"))
    made = step.init(create, KEY)
    assert len(counts) == 3 and sum(counts) == len(jax.tree.leaves(whole))
    assert_same(whole, step.unshard(made), "made", tol=0.0)


def memory(step: shardfn.ShardedStep, init) -> list[tuple[int, int, int]]:
    """Of each program: how many leaves it makes, their bytes on one device, and what it
    needs besides."""
    storage = step.storage
    leaves, _ = storage.leaves((jax.eval_shape(init, KEY),))
    replicated = NamedSharding(storage.mesh, PartitionSpec())
    key = jax.ShapeDtypeStruct((), KEY.dtype, sharding=replicated)
    found = _init_state.programs(*storage.stored_init(init, leaves), (key,))
    numbers = ((len(chosen), program.memory_analysis()) for chosen, program in found)
    return [(n, m.output_size_in_bytes, m.temp_size_in_bytes) for n, m in numbers]


def shards(step: shardfn.ShardedStep, init) -> int:
    storage = step.storage
    leaves, _ = storage.leaves((jax.eval_shape(init, KEY),))
    avals = [storage.stored_aval(leaf, s) for leaf, s in storage.each(leaves)]
    return sum(4 * math.prod(x.sharding.shard_shape(x.shape)) for x in avals)


LEAF = 4 * 512 * 257


@pytest.mark.parametrize("where", ["cpu", aot("h100:8")])
def test_a_device_holds_its_shards_and_the_largest_leaf(where, monkeypatch) -> None:
    monkeypatch.setattr(_init_state, "INIT_BYTES", 0)
    mesh = make_mesh("8") if where == "cpu" else targets.mesh(where, ("data",), None)
    step = step_on(mesh)
    found = memory(step, random)
    own = shards(step, random)
    assert sum(made for _, made, _ in found) <= own + 8 * 6  # and its list of pointers
    assert all(temporary <= LEAF for *_, temporary in found), found
    if where != "cpu":  # random bits are made in registers
        assert [(n, temporary < 2**14) for n, _, temporary in found] == [(6, True)]


@pytest.mark.parametrize("where", ["cpu", aot("h100:8")])
def test_leaves_that_are_made_whole_are_made_one_by_one(where, monkeypatch) -> None:
    """A decomposition is not made in parts, and needs room of its own."""
    monkeypatch.setattr(_init_state, "INIT_BYTES", 0)
    mesh = make_mesh("8") if where == "cpu" else targets.mesh(where, ("data",), None)
    found = memory(step_on(mesh), orthogonal)
    assert [n for n, *_ in found] == [1, 1, 1]
    assert all(temporary <= 4.5 * 4 * 128 * 128 for *_, temporary in found), found
