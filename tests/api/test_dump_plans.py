"""In: a folder that the environment names. Out: in it, a plan after each stage, with
what the stage changed.
"""

import jax
import jax.numpy as jnp
import pytest
from plan_helpers import shard_fn

import shardfn
from shardfn._api.dump_plans import changes
from shardfn._schedule.pipeline import PASSES


def loss_fn(w, x):
    h = jnp.tanh(x @ w["up"])
    return jnp.sum((h @ w["up"].T) ** 2)


def train_step(w, x):
    return jax.tree.map(lambda w, g: w - g, w, jax.grad(loss_fn)(w, x)), ()


def test_a_plan_is_written_after_each_stage(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SHARDFN_DUMP_TO", str(tmp_path / "plans"))
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    case = shard_fn(train_step, mesh, {"up": (16, 32)}, (8, 16))
    gathers = sum(line.op == "all_gather" for line in case.plan.collectives)
    (folder,) = (tmp_path / "plans").iterdir()
    assert folder.name.startswith("train_step-")
    stages = ["propagate", *(step.name for step in PASSES)]
    files = [folder / f"{i:02}-{stage}.txt" for i, stage in enumerate(stages)]
    assert sorted(folder.iterdir()) == files
    texts = [path.read_text() for path in files]
    first = f"train_step after {stages[0]}: 0 lines added, 0 removed\n\n"
    assert texts[0].startswith(first) and " = all_gather data %" in texts[0]
    shared = texts[stages.index("share_gathers")]
    lines = shared.splitlines()
    assert any(x.startswith("- ") and " all_gather data " in x for x in lines)
    left = [x for x in lines if " all_gather data " in x and not x.startswith("- ")]
    assert len(left) == gathers
    assert all("for up" in x for x in left)
    unchanged = texts[stages.index("prefetch")]
    assert " after prefetch: 0 lines added, 0 removed\n" in unchanged


def test_a_folder_that_cannot_be_made_is_named(tmp_path, monkeypatch) -> None:
    file = tmp_path / "plans"
    file.write_text("")
    monkeypatch.setenv("SHARDFN_DUMP_TO", str(file))
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    with pytest.raises(shardfn.ShardingError) as error:
        str(shard_fn(lambda w, x: (w, ()), mesh, {"up": (16, 8)}, (8, 16)).plan)
    lines = str(error.value).splitlines()
    assert lines[0] == (
        f"SHARDFN_DUMP_TO is '{file}', where plans cannot be written: Not a directory."
    )
    assert lines[2].startswith("Name a folder that can be written to")


def test_changes_are_marked_in_place() -> None:
    text = changes(["a", "b", "c"], ["a", "x", "c", "d"])
    assert text == "2 lines added, 1 removed\n\n  a\n- b\n+ x\n  c\n+ d"


def test_nothing_is_written_unless_asked(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("SHARDFN_DUMP_TO", raising=False)
    monkeypatch.chdir(tmp_path)
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    assert shard_fn(train_step, mesh, {"up": (16, 32)}, (8, 16)).plan.collectives
    assert list(tmp_path.iterdir()) == []
