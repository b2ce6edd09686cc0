"""In: states whose parameters are split over a mesh axis `model` too. Out: the same
bits and the same splits, restored onto meshes with that axis and without it.
"""

from functools import partial
from pathlib import Path
from typing import Any

import drawn
import jax
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import shardfn
from shardfn.storage.checkpoint import Checkpoints
from shardfn.storage.safetensors import write_safetensors
from shardfn.testing import assert_same

pytestmark = pytest.mark.standard_promotion

SPECS = {
    "columns": P(None, "model"),
    "rows": P("model"),
    "bias": P("model"),
    "odd": P(None, "model"),
    "flat": P("model"),
    "alone": P(),
}
SHAPES = {
    "columns": (16, 24),
    "rows": (24, 16),
    "bias": (24,),
    "odd": (1003, 8),
    "flat": (4, 5, 7),
    "alone": (61, 83),
}
TX = optax.adam(1e-3)
MESHES = {
    "2x4": ((2, 4), ("data", "model")),
    "4x2": ((4, 2), ("data", "model")),
    "2x2x2": ((2, 2, 2), ("replica", "data", "model")),
    "data": ((8,), ("data",)),
    "alone": None,
}


def create(mesh: jax.sharding.Mesh | None = None) -> dict[str, Any]:
    params = drawn.arrays(jax.random.key(0), SHAPES)
    if mesh is not None and "model" in mesh.axis_names:
        split = {k: NamedSharding(mesh, spec) for k, spec in SPECS.items()}
        params = jax.lax.with_sharding_constraint(params, split)
    return {"params": params, "optimizer": TX.init(params)}


@pytest.fixture(scope="module")
def steps() -> dict[str, shardfn.ShardedStep | None]:
    def make(name: str) -> shardfn.ShardedStep | None:
        if MESHES[name] is None:
            return None
        sizes, names = MESHES[name]
        mesh = jax.make_mesh(sizes, names, (jax.sharding.AxisType.Auto,) * len(sizes))
        axes = tuple(n for n in names if n != "model")
        axis = axes if len(axes) > 1 else axes[0]
        return shardfn.fully_shard(lambda s, x: (s, x), mesh, axis=axis, min_size=8)

    return {name: make(name) for name in MESHES}


@pytest.fixture(scope="module")
def whole() -> Any:
    return jax.jit(create)()


@pytest.fixture(scope="module")
def states(steps, whole) -> dict[str, Any]:
    """The same bits on every mesh: XLA may round a random number's logarithm otherwise
    in another program."""

    def placed(step: shardfn.ShardedStep) -> Any:
        params = whole["params"]
        if "model" in step.mesh.axis_names:
            split = {k: NamedSharding(step.mesh, spec) for k, spec in SPECS.items()}
            params = jax.device_put(params, split)
        return step.shard(whole | {"params": params})

    return {k: whole if step is None else placed(step) for k, step in steps.items()}


@pytest.fixture(scope="module")
def saved(steps, states, tmp_path_factory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp(name) for name in steps}
    for name, folder in folders.items():
        with Checkpoints(folder, steps[name]) as checkpoints:
            checkpoints.save(1, states[name])
        write_safetensors(folder / "model", states[name], steps[name])
    return folders


@pytest.mark.parametrize(
    "source, target",
    [
        ("2x4", "data"),
        ("data", "2x4"),
        ("2x4", "alone"),
        ("alone", "4x2"),
        ("4x2", "2x2x2"),
        ("2x2x2", "2x4"),
    ],
)
def test_restored_elsewhere(source, target, saved, steps, states, whole) -> None:
    step = steps[target]
    like = whole if step is None else step.abstract(partial(create, step.mesh))
    with Checkpoints(saved[source], step) as checkpoints:
        restored = checkpoints.restore(like)
    got = restored if step is None else step.unshard(restored)
    assert_same(whole, got, "restored", tol=0.0)
    shardings = jax.tree.map(lambda x: x.sharding, [restored, states[target]])
    assert shardings[0] == shardings[1]
    if target == "2x4":
        for params in (restored["params"], restored["optimizer"][0].mu):
            assert params["columns"].sharding.spec == P("data", "model")


def test_files_hold_the_same(saved) -> None:
    files = {name: (folder / "model").read_bytes() for name, folder in saved.items()}
    assert len(set(files.values())) == 1
