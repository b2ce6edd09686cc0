"""In: checkpoints whose files were changed after they were written. Out: no wrong value
is ever read; what is damaged is named. `benchmarks/damaged_checkpoints.py` does it more
often, and measures what the checksums cost.
"""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks.damaged_checkpoints import (
    EXTRA,
    clear,
    create,
    flip,
    outcomes,
    step_on,
)
from shardfn.storage._checkpoint_files import CheckpointFiles
from shardfn.storage._damage import damage
from shardfn.storage.checkpoint import (
    CheckpointError,
    Checkpoints,
    DamagedCheckpointError,
)

pytestmark = pytest.mark.optimized  # bits of programs that compile at several times

LIKE = jax.eval_shape(create, jax.random.key(0))
RECORD = "_CHECKPOINT_METADATA"


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    folder, step = tmp_path_factory.mktemp("good"), step_on(8)
    with Checkpoints(folder, step) as checkpoints:
        checkpoints.save(60, step.init(create, jax.random.key(0)), EXTRA)
    return folder


@pytest.mark.parametrize("harm", [flip, clear])
def test_no_wrong_value_is_read(harm, good) -> None:
    found = outcomes(good, harm, 12)
    # Files have other names in every run, so which ones are harmed is not the same.
    assert found["found"] and set(found) <= {"found", "changed nothing"}, found


@pytest.mark.parametrize("devices", [8, 3, None])
def test_a_flipped_bit_of_a_leaf_is_found_and_named(devices, good, tmp_path) -> None:
    """Also where the devices do not divide it. TensorStore keeps small arrays in its
    B-tree, which has checksums of its own."""
    whole = jax.jit(create)(jax.random.key(0))
    step = devices and step_on(devices)
    for name in ("even", "flat", "half", "padded"):
        bad = tmp_path / name
        shutil.copytree(good, bad)
        flip_value(bad, jax.device_get(whole[name]).reshape(-1)[:2].tobytes())
        with Checkpoints(bad, step) as checkpoints:
            with pytest.raises(DamagedCheckpointError) as error:
                checkpoints.restore(LIKE)
            assert checkpoints.extra() == EXTRA, "its file is whole"
        first, where, advice = str(error.value).splitlines()
        start = f"checkpoint 60 in {bad} is damaged: ValueError: leaf '{name}': DATA_"
        assert first.startswith(start)
        assert where.startswith("  it was read at test_damaged_checkpoint.py:")
        assert advice == "Restore an older checkpoint, in every process."
        assert error.value.number == 60


def flip_value(folder: Path, value: bytes) -> None:
    """Flips a bit wherever these bytes are in a file of arrays."""
    count = 0
    for path in folder.rglob("d/*"):
        data = path.read_bytes()
        changed = bytes([value[0] ^ 64]) + value[1:]
        path.write_bytes(data.replace(value, changed))
        count += data.count(value)
    assert count, "the value is in a file"


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r["custom_metadata"]["extra"]["position"].update(next_index=61),
        lambda r: r["custom_metadata"].update(extra=None),
        lambda r: r["custom_metadata"].pop("checksum"),
        lambda r: r.pop("custom_metadata"),
        lambda r: r.update(custom_metadata=[1]),
        lambda r: r.update(no_such_key=1),
        lambda r: r.update(performance_metrics=3),
    ],
)
def test_what_is_saved_beside_the_state_is_checked(change, good, tmp_path) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(good, bad)
    path = bad / "60" / RECORD
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))
    with pytest.raises(DamagedCheckpointError, match="checkpoint 60 in .* is damaged"):
        with Checkpoints(bad) as checkpoints:
            checkpoints.extra()


@pytest.mark.parametrize(
    "error, is_damage",
    [
        (FileNotFoundError("no such file"), True),
        (ValueError("DATA_LOSS: Error reading local file"), True),
        (json.JSONDecodeError("Expecting value", "", 0), True),
        (MemoryError(), False),
        (PermissionError(13, "Permission denied"), False),
        (OSError(5, "Input/output error"), False),
        (ValueError("RESOURCE_EXHAUSTED: Too many open files"), False),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), False),
    ],
    ids=repr,
)
def test_only_what_is_for_the_files_is_damage(error, is_damage) -> None:
    assert (damage(error) is not None) == is_damage


def test_what_need_not_be_for_the_files_is_not_called_damage(good, monkeypatch) -> None:
    def fail(self, number: int) -> None:
        raise ValueError("RESOURCE_EXHAUSTED: Too many open files")

    with Checkpoints(good) as checkpoints:
        monkeypatch.setattr(CheckpointFiles, "record", fail)
        with pytest.raises(ValueError, match="RESOURCE_EXHAUSTED") as error:
            checkpoints.restore(LIKE)
    assert not isinstance(error.value, CheckpointError)


def test_keys_of_another_kind_do_not_fit(tmp_path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"key": jax.random.key(1, impl="rbg"), "w": jnp.ones(3)})
        like = {"key": jax.random.key(1, impl="unsafe_rbg"), "w": jnp.ones(3)}
        with pytest.raises(CheckpointError) as error:
            checkpoints.restore(like)
        assert not isinstance(error.value, DamagedCheckpointError)
    assert str(error.value).splitlines()[1] == (
        "    different: 'key' is of dtype key<rbg>, and of key<urbg> in the state"
    )


@pytest.mark.parametrize(
    "state, message",
    [
        (
            {"a": {"w": jnp.ones(4, "uint4")}},
            "state leaf 'a/w' is uint4, which TensorStore cannot write.",
        ),
        (
            {"\ud800": jnp.ones(4)},
            r"state leaf '\ud800' has a name that is no Unicode text: half of a "
            "surrogate pair.",
        ),
    ],
)
def test_leaves_that_cannot_be_written_are_named(state, message, tmp_path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError) as error:
            checkpoints.save(1, state)
        assert str(error.value).splitlines()[0] == message
        assert list(tmp_path.iterdir()) == []
        checkpoints.save(1, {"w": jnp.ones(4)})
        checkpoints.wait()
        assert checkpoints.numbers == [1]
