"""In: states stored in every way. Out: `safetensors` files whose readers find the same
bits under each leaf's path, and no more memory than a leaf's; errors.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import drawn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import deserialize, safe_open
from tiers import exhaustively

import shardfn
from shardfn.storage import safetensors
from shardfn.storage._stored_array import stored_array
from shardfn.storage.safetensors import DTYPES, ExportError, write_safetensors

SHAPES = {
    "even": (16, 6),
    "padded": (1003, 2),
    "flat": (5, 7),
    "layers": (3, 50, 70),
    "empty": (0, 3),
    "scalar": (),
}
WIDE = {"int64", "uint64", "float64"}  # JAX makes 32 bits of them


def create(key: jax.Array):
    params = drawn.arrays(key, SHAPES)
    dtypes = {d: jnp.arange(21).reshape(3, 7).astype(d) for d in {*DTYPES} - WIDE}
    return {"params": params, "dtypes": dtypes, "key": jax.random.key(3)}


@pytest.fixture(scope="module")
def whole():
    return jax.jit(create)(jax.random.key(0))


def expected(whole) -> dict[str, np.ndarray]:
    words = jax.tree.map(np.asarray, whole | {"key": jax.random.key_data(whole["key"])})
    named, _ = jax.tree_util.tree_flatten_with_path(words)
    return {".".join(k.key for k in path): x for path, x in named}


def assert_file(path: Path, tensors: dict[str, np.ndarray]) -> None:
    found = dict(deserialize(path.read_bytes()))
    assert sorted(found) == sorted(tensors)
    with safe_open(path, "numpy") as file:
        for name, x in tensors.items():
            kind, shape = found[name]["dtype"], tuple(found[name]["shape"])
            assert (kind, shape) == (DTYPES[x.dtype.name], x.shape), name
            assert found[name]["data"] == x.tobytes(), name
            if "float8" not in x.dtype.name:  # NumPy alone has none of these
                tensor = file.get_tensor(name)
                assert (tensor.dtype, tensor.tobytes()) == (x.dtype, x.tobytes())


def mesh_of(*sizes: int) -> jax.sharding.Mesh:
    devices = jax.devices()[: int(np.prod(sizes))]
    return jax.make_mesh(sizes, ("model", "data")[-len(sizes) :], devices=devices)


@pytest.mark.parametrize("sizes", [exhaustively((3,)), (2, 4)], ids=str)
def test_readers_find_the_same_bits(sizes, whole, tmp_path) -> None:
    step = shardfn.fully_shard(lambda s, x: (s, x), mesh_of(*sizes), min_size=8)
    state = step.shard(whole)
    stored = {k: stored_array(x).shape for k, x in state["params"].items()}
    assert stored["flat"] != SHAPES["flat"] and stored["padded"] != SHAPES["padded"]
    path = tmp_path / "model.safetensors"
    names = write_safetensors(path, state, step, metadata={"made by": "a test"})
    assert_file(path, expected(whole))
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    with safe_open(path, "numpy") as file:
        assert list(file.offset_keys()) == names
        assert file.metadata() == {"made by": "a test"}


def test_whole_states_of_jax_and_of_numpy(whole, tmp_path) -> None:
    write_safetensors(tmp_path / "jax", whole)
    assert_file(tmp_path / "jax", expected(whole))
    host = {"a": np.arange(6, dtype=np.float32).reshape(2, 3).T, "b": np.int32(5)}
    write_safetensors(tmp_path / "numpy", host)
    assert_file(tmp_path / "numpy", {k: np.asarray(x) for k, x in host.items()})


def test_part_of_a_state_under_other_names(whole, tmp_path) -> None:
    step = shardfn.fully_shard(lambda s, x: (s, x), mesh_of(8), min_size=8)

    def names(path: str) -> str | None:
        return path.removeprefix("params/") if path.startswith("params/") else None

    write_safetensors(tmp_path / "a", step.shard(whole), step, names=names)
    params = {k: np.asarray(x) for k, x in whole["params"].items()}
    assert_file(tmp_path / "a", params)
    write_safetensors(tmp_path / "b", step.shard(whole)["params"], step)
    assert_file(tmp_path / "b", params)


def test_a_file_that_cannot_be_finished_is_not_there(monkeypatch, tmp_path) -> None:
    path = tmp_path / "model"
    write_safetensors(path, {"a": jnp.ones(3)})

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr("shardfn.storage.safetensors._header", full)
    with pytest.raises(OSError, match="no space left on device"):
        write_safetensors(path, {"a": jnp.zeros(3)})
    assert_file(path, {"a": np.ones(3, np.float32)})
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_what_cannot_be_written(tmp_path) -> None:
    with pytest.raises(ExportError) as error:
        write_safetensors(tmp_path / "a", {"a.b": jnp.ones(2), "a": {"b": jnp.ones(2)}})
    first, where, advice = str(error.value).splitlines()
    assert first == "two leaves of the state would be called 'a.b' in the file."
    assert where.startswith("  write_safetensors was called at test_safetensors.py:")
    assert advice == "Pass names=, a function that gives each path a name of its own."
    with pytest.raises(ExportError) as error:
        write_safetensors(tmp_path / "a", {"w": {"small": jnp.ones(2, jnp.int4)}})
    first, where, advice = str(error.value).splitlines()
    assert first == (
        "state leaf 'w/small' is int4, which safetensors files cannot hold."
    )
    assert advice == "Cast it in the state, or pass names= that gives None for it."
    for name in ("__metadata__", "\ud800"):
        with pytest.raises(ExportError) as error:
            write_safetensors(tmp_path / "a", {name: jnp.ones(2), "b": jnp.ones(2)})
        first, where, advice = str(error.value).splitlines()
        assert first == (
            f"state leaf {name!a} would be called {name!a} in the file, which no "
            "reader takes."
        )
        assert where.startswith("  write_safetensors was called at test_safetensors.py")
        assert advice == (
            "Pass names=, a function that gives it another name, or None."
        )
    assert not list(tmp_path.iterdir())


def test_writers_do_not_meet_and_follow_no_link(tmp_path, monkeypatch) -> None:
    """Two write the same path, one while the other does; what other writers of that
    path have left is not touched."""
    path, victim = tmp_path / "model", tmp_path / "victim"
    victim.write_text("kept")
    (tmp_path / ".model.partial").symlink_to(victim)
    path.symlink_to(victim)
    header = safetensors._header

    def meanwhile(tensors, metadata):
        monkeypatch.setattr(safetensors, "_header", header)
        write_safetensors(path, {"a": jnp.zeros(3)})
        assert_file(path, {"a": np.zeros(3, np.float32)})
        return header(tensors, metadata)

    monkeypatch.setattr(safetensors, "_header", meanwhile)
    write_safetensors(path, {"a": jnp.ones(3)})
    assert_file(path, {"a": np.ones(3, np.float32)})
    assert victim.read_text() == "kept" and not path.is_symlink()
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == [".model.partial", "model", "victim"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_that_of_one_leaf(tmp_path) -> None:
    """0.46 of the state is its largest leaf; 0.52 when this was written."""
    program = Path(__file__).with_name("checkpoint_memory.py")
    out = subprocess.run(
        [sys.executable, program, "export", str(tmp_path)],
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert json.loads(out.stdout)["peak"] < 0.6
