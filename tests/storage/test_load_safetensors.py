"""In: `safetensors` files as others write them. Out: states with their values, however
they are stored, of which each byte is read once; no more memory than the shards; every
misfit, by leaf, tensor and file.
"""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint_memory import on_disk

import shardfn
from shardfn.storage import _load_safetensors, _tensor_axes, _tensor_files
from shardfn.storage._stored_array import StoredArray
from shardfn.storage.safetensors import (
    LoadError,
    load_safetensors,
    write_safetensors,
)
from shardfn.testing import assert_same

RNG = np.random.default_rng(0)


def values(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.arange(math.prod(shape)).reshape(shape).astype(dtype)


BFLOAT16 = ml_dtypes.bfloat16
TENSORS = {
    "tok.weight": values(61, 8),
    **{f"h.{i}.q.weight": i - values(20, 8, dtype=BFLOAT16) for i in range(3)},
    **{f"h.{i}.{n}": i + values(5, 7) for i in range(3) for n in ("a", "b")},
    **{f"h.{i}.norm": values(8, dtype=np.float16) + i for i in range(3)},
    "flat": values(5, 7),
    "long": values(83, 61),
    "padded": values(1003, 2, dtype=BFLOAT16),
    "grouped": values(4, 5, 8),
    "steps": np.int32(7),
    "none": values(0, 3),
    "h.0.inv_freq": values(4),
}
NAMES = {
    r"tok\.weight": ["embed", ("head", "v d -> d v")],
    r"h\.(\d+)\.q\.weight": (r"layers/q[\1]", "(h k) d -> d h k"),
    r"h\.(\d+)\.a": (r"layers/ab[\1, 0]", "i o -> o i"),
    r"h\.(?P<layer>\d+)\.b": (r"layers/ab[\g<layer>, 1]", "i o -> o i"),
    r"h\.(\d+)\.norm": r"layers/norm/\1",
    r"h\.\d+\.inv_freq": None,
    "long": ("long", "b a -> a b"),
    "grouped": ("grouped", "h k d -> d (h k)"),
    "(.*)": r"\1",
}


def expected() -> dict[str, Any]:
    """What the names above say, by hand."""
    t = {k: np.asarray(v) for k, v in TENSORS.items()}
    q = [t[f"h.{i}.q.weight"].reshape(4, 5, 8).transpose(2, 0, 1) for i in range(3)]
    ab = [[t[f"h.{i}.{n}"].T for n in ("a", "b")] for i in range(3)]
    return {
        "embed": t["tok.weight"],
        "head": t["tok.weight"].T,
        "layers": {
            "q": np.stack(q).astype(np.float32),
            "ab": np.stack(ab).astype(BFLOAT16),
            "norm": [t[f"h.{i}.norm"].astype(np.float32) for i in range(3)],
        },
        "flat": t["flat"].astype(BFLOAT16),
        "long": t["long"].T,
        "padded": t["padded"].astype(np.float32),
        "grouped": t["grouped"].reshape(20, 8).T,
        "steps": t["steps"],
        "none": t["none"],
    }


LIKE = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, expected()))


def write_folder(folder: Path, tensors: dict[str, np.ndarray] = TENSORS) -> Path:
    """Two files and their index, as Hugging Face writes them."""
    names = list(tensors)
    files = {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-{i + 1:05}-of-00002.safetensors"
        write_safetensors(
            folder / file, {k: tensors[k] for k in part}, metadata={"format": "pt"}
        )
        files |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("weights"))


def step_on(*sizes: int) -> shardfn.ShardedStep:
    devices = jax.devices()[: math.prod(sizes)]
    names = ("replica", "data")[-len(sizes) :]
    mesh = jax.make_mesh(sizes, names, devices=devices)
    return shardfn.fully_shard(lambda s, x: (s, x), mesh, axis=names, min_size=8)


@pytest.mark.parametrize("sizes", [(8,), (3,), (2, 4), ()], ids=str)
def test_every_leaf_is_what_its_tensors_are(sizes, folder, monkeypatch) -> None:
    """Also in boxes of a few bytes; each byte of the files is read once."""
    read, count = _tensor_files.read_into, []

    def counted(file, row, start):
        count.append(len(row))
        read(file, row, start)

    monkeypatch.setattr(_tensor_files, "read_into", counted)
    monkeypatch.setattr(_tensor_files, "BLOCK_BYTES", 1)
    monkeypatch.setattr(_tensor_files, "READ_BYTES", 48)
    step = step_on(*sizes) if sizes else None
    state = load_safetensors(folder, LIKE, step, names=NAMES)
    leaves = jax.tree.leaves(state)
    if step is None:
        assert all(len(x.devices()) == 1 for x in leaves)
    else:
        assert [x.sharding for x in leaves] == jax.tree.leaves(step.shardings(LIKE))
        assert {type(x) for x in leaves} == {StoredArray, type(state["steps"])}
    assert_same(expected(), jax.tree.map(np.asarray, state), "loaded", tol=0.0)
    twice = TENSORS["tok.weight"].nbytes - TENSORS["h.0.inv_freq"].nbytes
    assert sum(count) == sum(x.nbytes for x in TENSORS.values()) + twice


def test_leaves_that_another_mesh_axis_splits_too(tmp_path) -> None:
    """A leaf is split as the state that is passed says."""
    mesh = jax.make_mesh((2, 4), ("model", "data"))
    step = shardfn.fully_shard(lambda s, x: (s, x), mesh, axis="data", min_size=8)
    x = values(6, 9, 10)
    write_safetensors(tmp_path / "a", {f"w.{i}": x[i].T for i in range(6)})
    by_model = jax.NamedSharding(mesh, jax.P(None, None, "model"))
    like = {"w": jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=by_model)}
    names = {r"w\.(\d)": (r"w[\1]", "o i -> i o")}
    state = load_safetensors(tmp_path / "a", like, step, names=names)
    assert "model" in str(state["w"].sharding.spec)
    assert state["w"].sharding == step.shardings(like)["w"]
    np.testing.assert_array_equal(state["w"], x)


def test_leaves_without_a_tensor(folder) -> None:
    """They are the state's own where it has values, and else zero."""
    step = step_on(8)
    moments = {"mu": jnp.full((16, 3), 2.0), "nu": jnp.full((5, 7), 3.0)}
    given = step.shard({"opt": moments})["opt"]
    zeros = {"w": jax.ShapeDtypeStruct((9, 3), jnp.bfloat16)}
    state = LIKE | {"opt": given, "zeros": zeros, "key": jax.random.key(3)}
    allowed = ["opt", "zeros/*", "key"]
    loaded = load_safetensors(folder, state, step, names=NAMES, allow_missing=allowed)
    assert loaded["opt"]["mu"] is given["mu"], "not a copy"
    whole = step.unshard(loaded)
    assert_same(moments, whole["opt"], "given", tol=0.0)
    assert whole["zeros"]["w"].dtype == jnp.bfloat16 and not whole["zeros"]["w"].any()
    assert whole["key"] == jax.random.key(3)
    step(loaded, jnp.ones(8))
    again = LIKE | {"opt": loaded["opt"]}
    with pytest.raises(LoadError) as error:
        load_safetensors(folder, again, step, names=NAMES, allow_missing="opt")
    assert "\n    deleted: 'opt/mu' of the state was donated to an earlier call\n" in (
        str(error.value)
    )


def test_what_write_safetensors_has_written(tmp_path) -> None:
    """Without names; weak types and keys are those of the state."""
    whole = {
        "a": {"b": jnp.arange(35.0).reshape(5, 7), "c": jnp.asarray(1.5)},
        "keys": jax.random.split(jax.random.key(3), 2),
        "weak": jax.jit(lambda: 1.5)(),
    }
    step = step_on(8)
    write_safetensors(tmp_path / "model", step.shard(whole), step)
    for of in (step_on(3), None):
        loaded = load_safetensors(tmp_path / "model", whole, of)
        assert_same(whole, of.unshard(loaded) if of else loaded, "loaded", tol=0.0)
        assert loaded["weak"].weak_type
    named = load_safetensors(
        tmp_path / "model",
        {"params": whole},
        names=lambda name: "params/" + name.replace(".", "/"),
    )
    assert_same(whole, named["params"], "loaded", tol=0.0)


UP = {r"up\.(\d)": r"up[\1]"}
ROWS = {"up.0": values(3), "up.1": values(3)}


@pytest.mark.parametrize(
    "tensors, state, names, lines",
    [
        (ROWS | {"new": values(3)}, {"up": (2, 3)}, UP, ["unused: 'new' float32[3]"]),
        (ROWS, {"up": (2, 3), "b": (3,)}, UP, ["missing: 'b' float32[3]"]),
        (ROWS, {"up": (3, 3)}, UP, ["missing: 'up'[2] of float32[3,3]"]),
        (
            ROWS,
            {"up": (1, 3)},
            UP,
            ["no such index: 'up'[1] of [1,3], for 'up.1' float32[3] in FILE"],
        ),
        (
            ROWS,
            {"up": (2, 4)},
            UP,
            [
                f"different: 'up.{i}' float32[3] in FILE cannot become 'up'[{i}] "
                "float32[4]"
                for i in range(2)
            ],
        ),
        (
            {"w": values(6, 4)},
            {"w": (4, 2, 5)},
            {"w": ("w", "(h k) d -> d h k")},
            [
                "different: 'w' float32[6,4] in FILE cannot become 'w' float32[4,2,5] "
                "by '(h k) d -> d h k'"
            ],
        ),
        (
            {"w": values(3, dtype=np.int8)},
            {"w": (3,)},
            None,
            ["different: 'w' int8[3] in FILE cannot become 'w' float32[3]"],
        ),
        (
            ROWS,
            {"w": (3,)},
            {"up.*": "w"},
            ["twice: 'w' float32[3], for 'up.0' float32[3] in FILE and 'up.1' float32"],
        ),
        (
            ROWS | {"all": values(2, 3)},
            {"up": (2, 3)},
            {"all": "up"} | UP,
            [
                f"another index: 'up'[{i}] for 'up.{i}' float32[3] in FILE, and 'up' "
                "for 'all' float32[2,3] in FILE"
                for i in range(2)
            ],
        ),
        (
            {"w": values(3)},
            {"w": (3,)},
            {"w": ["w", "v"]},
            ["no such leaf: 'v', for 'w' float32[3]"],
        ),
    ],
)
def test_every_misfit_is_listed(tensors, state, names, lines, tmp_path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, tensors, names=lambda name: name)
    like = {k: jax.ShapeDtypeStruct(shape, jnp.float32) for k, shape in state.items()}
    with pytest.raises(LoadError) as error:
        load_safetensors(path, like, names=names)
    first, *found, where, advice = str(error.value).splitlines()
    assert first == f"the tensors in {path} do not fit the state:"
    text = "\n".join(found).replace("model.safetensors", "FILE")
    for line in lines:
        assert f"    {line}" in text
    assert len(found) == len(lines), "nothing is said twice"
    assert where.startswith("  load_safetensors was called at test_load_safetensors.py")
    assert advice.startswith("Pass names=, which says what leaf each tensor is for")


@pytest.mark.parametrize(
    "names, reason",
    [
        ({"(": "w"}, "has '(', which is no regex (missing ), unterminated subpattern"),
        ({"w": r"w[\1]"}, r"has 'w[\\1]' for 'w': invalid group reference 1"),
        ({"(.)": r"w[\1]"}, "has 'w[w]', which is no path, nor one with an index"),
        (
            {"w": ("w", "a b -> b")},
            "has the axes 'a b -> b', where such as '(h k) d ->",
        ),
        ({"w": ("w", "(a b -> b a")}, "has the axes '(a b -> b a', where such as"),
        ({"w": 3}, "has 3, which is no path, nor a pair of path and axes"),
    ],
)
def test_names_that_cannot_be_read(names, reason, tmp_path) -> None:
    write_safetensors(tmp_path / "a", {"w": values(3)})
    with pytest.raises(LoadError) as error:
        load_safetensors(tmp_path / "a", {"w": values(3)}, names=names)
    first, where, advice = str(error.value).splitlines()
    assert first.startswith(f"names= {reason}")
    assert where.startswith("  load_safetensors was called at test_load_safetensors.py")
    assert advice.startswith(r"Pass a mapping such as {r'layers\.(\d+)")


def test_two_leaves_of_one_path(tmp_path) -> None:
    write_safetensors(tmp_path / "a", {"w": values(3)})
    state = {"a/b": values(3), "a": {"b": values(3)}}
    with pytest.raises(LoadError, match="\n    two leaves: 'a/b'\n"):
        load_safetensors(tmp_path / "a", state, names={"w": "a/b"})


def test_a_pattern_that_matches_no_leaf(folder) -> None:
    with pytest.raises(LoadError) as error:
        load_safetensors(folder, LIKE, names=NAMES, allow_missing="lyers")
    first, where, advice = str(error.value).splitlines()
    assert first == "allow_missing names 'lyers', which matches no leaf of the state."
    assert advice.startswith("Did you mean 'layers' or 'layers/q'")


@pytest.mark.parametrize(
    "file, harm, reason",
    [
        ("index", lambda b: b"{", "it has no 'weight_map' (JSONDecodeError("),
        ("index", lambda b: b.replace(b"h.0.a", b"h.9.a"), "'h.9.a' is not in model-0"),
        (
            "index",
            lambda b: b.replace(b"00001-", b"00003-"),
            "it names model-00003-of-",
        ),
        ("00001", lambda b: b[:-9], "it ends before '"),
        ("00001", lambda b: b[:5], "a header of "),
        ("00001", lambda b: b[:8] + b"[" + b[9:], "its header is no list of tensors ("),
        (
            "00001",
            lambda b: b.replace(b"[61,8]", b"[61,9]"),
            "'tok.weight' of shape (61",
        ),
    ],
)
def test_files_that_are_damaged(file, harm, reason, tmp_path) -> None:
    write_folder(tmp_path)
    (path,) = tmp_path.glob(f"*{file}*" if file != "index" else "*.json")
    path.write_bytes(harm(path.read_bytes()))
    with pytest.raises(LoadError) as error:
        load_safetensors(tmp_path, LIKE, names=NAMES)
    first, where, advice = str(error.value).splitlines()
    assert first.startswith(f"{path} is no whole safetensors file or index: {reason}")
    assert where.startswith("  load_safetensors was called at test_load_safetensors.py")
    assert advice == "Download or write it again."


def test_files_that_are_not_there(tmp_path) -> None:
    with pytest.raises(FileNotFoundError) as error:
        load_safetensors(tmp_path, LIKE)
    assert str(error.value).splitlines()[0] == (
        f"there is no safetensors file at {tmp_path}."
    )
    with pytest.raises(FileNotFoundError, match=f"at {re.escape(str(tmp_path))}/a"):
        load_safetensors(tmp_path / "a", LIKE)


def test_a_folder_without_an_index(tmp_path) -> None:
    write_safetensors(tmp_path / "a.safetensors", {"a": values(3)})
    write_safetensors(tmp_path / "b.safetensors", {"b": values(4)})
    (tmp_path / "pytorch_model.bin.index.json").write_text("of other files")
    loaded = load_safetensors(tmp_path, {"a": values(3), "b": values(4)})
    np.testing.assert_array_equal(loaded["b"], values(4))


def test_boxes_are_read_with_the_blocks_around_them(tmp_path, monkeypatch) -> None:
    """Every box of a few tensors, in boxes and blocks of a few sizes."""
    monkeypatch.setattr(_tensor_files, "READ_BYTES", 24)
    x = values(5, 4, 6, dtype=np.int16)
    write_safetensors(tmp_path / "a", {"x": x})
    (tensor,) = _tensor_files.tensors_in(tmp_path / "a")
    with (tmp_path / "a").open("rb", buffering=0) as opened:
        for block in (1, 4, 24):
            monkeypatch.setattr(_tensor_files, "BLOCK_BYTES", block)
            for _ in range(40):
                ends = [sorted(RNG.choice(n + 1, 2, replace=False)) for n in x.shape]
                box = tuple(slice(int(a), int(b)) for a, b in ends)
                seen = np.zeros(x.shape, int)
                for part in _tensor_files.boxes(x.shape, box, 2):
                    seen[part] += 1
                    found = _tensor_files.read_box(opened, tensor, x.shape, part)
                    np.testing.assert_array_equal(found, x[part])
                    assert found.nbytes <= 24 or found.shape[:-1] == (1, 1)
                assert (seen[box] == 1).all() and seen.max() == 1
                if block == 1:
                    assert seen.sum() == seen[box].sum()


@pytest.mark.parametrize(
    "text, tensor, leaf, sizes",
    [
        ("a b -> b a", (2, 3), (3, 2), {"a": 2, "b": 3}),
        ("(h k) d -> d h k", (6, 4), (4, 2, 3), {"h": 2, "k": 3, "d": 4}),
        ("o one i -> (o one) i", (4, 1, 3), (4, 3), {"o": 4, "one": 1, "i": 3}),
        ("->", (), (), {}),
        ("(h k) d -> d (k h)", (6, 4), (4, 6), None),  # nothing says what h and k are
        ("a b -> b a", (2, 3), (2, 3), None),
        ("a b -> b a", (2, 3, 1), (3, 2), None),
    ],
)
def test_sizes_of_axes(text, tensor, leaf, sizes) -> None:
    how = _tensor_axes.parse(text)
    assert how is not None and _tensor_axes.sizes_of(how, tensor, leaf) == sizes


@pytest.mark.parametrize("text", ["a b", "a -> b", "a a -> a", "(a -> a", "a ->-> a"])
def test_what_names_no_axes(text) -> None:
    assert _tensor_axes.parse(text) is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("devices, times", [(8, 1), (1, 3)])
def test_memory_is_that_of_the_shards(devices: int, times: int, tmp_path) -> None:
    """Of a file in bfloat16, whose tensors are transposed, in a float32 state. What is
    compiled takes some MB of its own."""
    shapes = on_disk(times)
    tensors = {k: np.zeros(shape, BFLOAT16) for k, shape in shapes.items()}
    tensors["padded"][7] = np.arange(shapes["padded"][1]) % 128
    write_safetensors(tmp_path / "model.safetensors", tensors)
    write_safetensors(tmp_path / "small.safetensors", {"even": values(2048, 1024)})
    program = Path(__file__).with_name("checkpoint_memory.py")
    out = subprocess.run(
        [sys.executable, program, "load", tmp_path, str(devices), str(times)],
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert json.loads(out.stdout)["peak"] < 1.2


@pytest.mark.parametrize("sizes", [(3,), (2, 2), ()], ids=str)
def test_large_shards_are_filled_in_slabs(sizes, folder, monkeypatch) -> None:
    """Down to a row at a time, of leaves in all layouts."""
    slabs, fill = [], _load_safetensors._filled
    monkeypatch.setattr(_load_safetensors, "READ_BYTES", 600)
    monkeypatch.setattr(_load_safetensors, "FILLED_SHARE", 0)
    monkeypatch.setattr(
        _load_safetensors,
        "_filled",
        lambda *args: [slabs.append(len(args[-1])), fill(*args)][1],
    )
    step = step_on(*sizes) if sizes else None
    state = load_safetensors(folder, LIKE, step, names=NAMES)
    assert_same(expected(), jax.tree.map(np.asarray, state), "loaded", tol=0.0)
    assert slabs.count(1) > 40
