"""The language model example is ended in every way, and goes on from its last save.

`KILLS=20 pytest -m '' tests/examples/test_lm_saving.py -k killed` kills it more often.
"""

import dataclasses
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import metrics
import numpy as np
import pytest
from best import Best
from config import Config, ConfigError, from_json, to_json, with_preset
from data import Packed
from metrics import Metrics, keep_until
from saving import ASIDE, SaveError, Saves, complete, misplaced, refuse_anew
from train import keep_choices, main

from shardfn.storage.checkpoint import Checkpoints

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "lm_pretrain" / "train.py"
KEPT = ("config.json", "metrics.jsonl")
KILLS = int(os.environ.get("KILLS", "2"))

pytestmark = pytest.mark.standard_promotion


def command(config: Config, *more: str) -> list[str]:
    """Returns the command line of `tiny`, on four devices."""
    flags = {
        "run-dir": config.run_dir,
        "devices": 4,
        "steps": config.steps,
        "save-every": config.save_every,
        "batch-size": config.batch_size,
        "data.files": config.data.files[0],
        "model.layers": config.model.layers,
        "model.width": config.model.width,
        "model.mlp-width": config.model.mlp_width,
        "model.context": config.model.context,
    }
    words = [word for k, v in flags.items() for word in (f"--{k}", str(v))]
    return [sys.executable, "-u", str(SCRIPT), *words, "--log.no-plot", *more]


def start(words: Sequence[str], log: Path) -> subprocess.Popen:
    with log.open("w") as file:
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env=env)


def wait_for(condition, process: subprocess.Popen, log: Path) -> None:
    for _ in range(6000):
        if condition():
            return
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
    raise AssertionError(f"nothing happened in five minutes: {log.read_text()}")


def losses(folder: str | Path) -> dict[int, float]:
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return {x["step"]: x["loss"] for x in map(json.loads, lines)}


def saved(config: Config) -> list[int]:
    folder = Path(str(config.run_dir)) / "checkpoints"
    return complete(folder) if folder.exists() else []


def test_the_state_with_the_lowest_heldout_loss_is_kept(tmp_path, capsys):
    def opened(done: int) -> Best:
        return Best(tmp_path, None, done)

    best = opened(0)
    for number, loss in enumerate((3.0, 2.0, 2.5, float("nan")), 1):
        best.add(number, {"w": jnp.full(4, loss)}, loss)
    best.checkpoints.close()
    best = opened(4)
    assert (best.loss, best.checkpoints.numbers) == (2.0, [2])
    best.checkpoints.close()
    assert opened(1).loss == math.inf
    assert capsys.readouterr().out == (
        f"{tmp_path}/best: removed, it is of step 2, which is taken anew\n"
    )
    (tmp_path / "best" / "7").mkdir()
    best = opened(9)
    assert best.loss == math.inf and "not to be read" in capsys.readouterr().out


def break_checkpoint(folder: Path) -> None:
    """Cuts its largest file in half."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)


@pytest.fixture
def saving(tiny: Config) -> Config:
    return dataclasses.replace(tiny, steps=6, save_every=2)


def test_a_run_that_was_stopped_has_the_losses_of_one_that_was_not(
    saving, tmp_path, monkeypatch, capsys
):
    main(dataclasses.replace(saving, run_dir=str(tmp_path / "whole")))
    add = Metrics.add

    def add_and_signal(self, step: int, *numbers: float) -> None:
        add(self, step, *numbers)
        if step == 2:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Metrics, "add", add_and_signal)
    before = signal.getsignal(signal.SIGTERM)
    assert main(saving) is None
    assert signal.getsignal(signal.SIGTERM) == before
    assert "stopped after step 3, saved" in capsys.readouterr().out
    assert saved(saving) == [2, 3]
    report = main(saving)
    assert report is not None and len(report.losses) == 3
    assert "going on after step 3 of 6" in capsys.readouterr().out
    assert losses(saving.run_dir) == losses(tmp_path / "whole")
    assert main(saving).losses == []  # a run at its end is only evaluated
    printed = capsys.readouterr().out
    assert "the run is complete: it has taken 6 steps, of 6. Give more" in printed


@pytest.mark.exhaustive
def test_an_older_checkpoint_is_used_if_one_is_cut_off(saving, monkeypatch, capsys):
    begun = dataclasses.replace(saving, steps=4, save_every=1)
    main(begun)
    folder = Path(saving.run_dir) / "checkpoints"

    def restore(*_) -> None:
        raise MemoryError("a machine that is too small")

    with monkeypatch.context() as patch, pytest.raises(SaveError) as caught:
        patch.setattr(Checkpoints, "restore", restore)
        main(begun)
    assert str(caught.value) == (
        f"checkpoint 4 in {folder} was not read: MemoryError: a machine that is too "
        "small\nThat need not be for its files, which are where they were. Start again "
        f"with --run-dir {saving.run_dir}, to go on from it."
    )
    assert saved(saving) == [2, 3, 4]
    break_checkpoint(folder / "4")
    capsys.readouterr()
    report = main(dataclasses.replace(saving, steps=5))
    printed = capsys.readouterr().out
    assert f"checkpoint 4 in {folder} cannot be read, an older one is used: " in printed
    assert "going on after step 3 of 5" in printed
    changes = [line for line in printed.splitlines() if line.startswith("changed:")]
    assert changes == [
        "changed:   --steps 5, which was 4: the learning rate now falls until that "
        "step",
        "changed:   --save-every 2, which was 1",
    ]
    assert len(report.losses) == 2
    for number in saved(saving):
        break_checkpoint(folder / str(number))
    kept = {name: (folder.parent / name).read_text() for name in KEPT}
    for steps in (5, 6):  # and again, as by a loop that starts it until it ends well
        with pytest.raises(SaveError) as caught:
            main(dataclasses.replace(saving, steps=steps))
        assert str(caught.value) == (
            f"none of the checkpoints [3, 4, 5] in {folder} can be read. They were "
            f"moved to {folder.parent}/unreadable: bring one back that can, or give "
            "another --run-dir."
        )
        assert kept == {name: (folder.parent / name).read_text() for name in KEPT}
    (folder / "7.orbax-checkpoint-tmp").mkdir()  # as of a save that was killed
    with pytest.raises(SaveError, match="none of the checkpoints"):
        refuse_anew(folder.parent)


class State(NamedTuple):
    step: jax.Array
    params: jax.Array


@pytest.fixture
def open_saves(saving):
    """Opens the saves of a run whose state is small."""

    def open_saves(text: int = 7, **changes) -> Saves:
        config = dataclasses.replace(saving, **changes)
        on = SimpleNamespace(train=None, abstract_state=state_of(0))
        packed = Packed(np.arange(text), np.zeros(1), text)
        return Saves(config, Path(saving.run_dir), on, packed)

    return open_saves


def state_of(step: int) -> State:
    return State(jnp.int32(step), jnp.full((3, 4), float(step)))


def save(saves: Saves, *numbers: int) -> None:
    with saves:
        for number in numbers:
            saves.save(number, state_of(number), {"next_index": number})


def test_a_run_goes_on_with_the_choices_and_the_text_that_it_began_with(
    open_saves, saving
):
    """The checkpoint knows them: other choices are refused, all are named, and no
    checkpoint is moved."""
    run = Path(saving.run_dir)
    save(open_saves(), 2)
    wider = dataclasses.replace(saving.model, width=32)
    files = dataclasses.replace(saving.data, files=("a", "b"))
    slower = dataclasses.replace(saving.optimizer, learning_rate=1e-4)
    changes = {"seed": 3, "data": files, "model": wider, "optimizer": slower}
    refusals = [
        ({"batch_size": 16}, "--batch-size 16: the run in {} was started with 8."),
        (
            changes,
            "--seed 3: the run in {} was started with 0.\n"
            f"--data.files a b: the run in {{}} was started with {saving.data.files[0]}"
            ".\n--model.width 32: the run in {} was started with 64.\n"
            "--optimizer.learning-rate 0.0001: the run in {} was started with 0.004.",
        ),
    ]
    for changes, lines in refusals:
        with open_saves(**changes) as saves, pytest.raises(ConfigError) as caught:
            saves.resume()
        told = "Give these" if "\n" in lines else "Give that"
        expected = lines.format(*[run] * 4)
        assert str(caught.value) == f"{expected} {told}, or another --run-dir."
    with open_saves(text=8) as saves, pytest.raises(ConfigError) as caught:
        saves.resume()
    assert str(caught.value) == (
        f"the text is not what it was at checkpoint 2 in {run}/checkpoints. "
        "Bring it back, or give another --run-dir."
    )
    with open_saves(keep=9) as saves:
        assert saves.resume().changes == ["changed:   --keep 9, which was 3"]
    assert saved(saving) == [2] and not (run / ASIDE).exists()


def test_what_is_damaged_or_of_another_step_is_set_aside(open_saves, saving, capsys):
    """One whose own record is changed, which Orbax reads when it opens the folder, and
    one with another's state; a state of another form stays where it is."""
    save(open_saves(keep=9), 2, 3, 4)
    folder = Path(saving.run_dir) / "checkpoints"
    shutil.rmtree(folder / "4" / "state")
    shutil.copytree(folder / "2" / "state", folder / "4" / "state")
    record = folder / "3" / "_CHECKPOINT_METADATA"
    record.write_text(record.read_text().replace("performance", "perfornance"))
    with open_saves(keep=9) as saves:
        resumed = saves.resume()
        assert (resumed.done, int(resumed.state.step)) == (2, 2)
        printed = capsys.readouterr().out
        assert f"checkpoint 3 in {folder} cannot be read, an older one" in printed
        assert f"checkpoint 4 in {folder} cannot be read, an older one" in printed
        assert "its state has taken 2 steps" in printed
        assert complete(folder.parent / ASIDE) == [3, 4]
        saves.abstract_state = state_of(0)._replace(params=jnp.zeros((5, 4)))
        with pytest.raises(SaveError) as caught:
            saves.resume()
    line = "    different: 'params' is float32[3,4], and float32[5,4] in the state"
    assert line in str(caught.value).splitlines()
    assert saved(saving) == [2]


def test_choices_are_kept_also_where_a_folder_is_in_the_way(saving, capsys):
    path = Path(saving.run_dir) / "config.json"
    path.mkdir(parents=True)
    keep_choices(saving, path.parent, ["changed: --keep"])
    assert from_json(path) == saving
    assert path.with_name("config.json.bad0").is_dir()
    assert capsys.readouterr().out == "changed: --keep\n"


def test_a_run_goes_on_by_its_folder_alone(tmp_path):
    began = Config(
        run_dir=str(tmp_path), steps=7, coordinator="a:1", process_count=4, process_id=3
    )
    (tmp_path / "config.json").write_text(to_json(began))
    for argv in (["--run-dir", str(tmp_path)], [f"--run-dir={tmp_path}"]):
        assert with_preset(argv) == Config(run_dir=str(tmp_path), steps=7)
    other = with_preset(["--run_dir", str(tmp_path), "--preset", "10m"])
    assert other == with_preset(["--preset", "10m"])
    for text in ("", "null", "[1]", '{"steps": 7, "no_flag": 1}'):
        (tmp_path / "config.json").write_text(text)
        assert with_preset(["--run-dir", str(tmp_path)]) == Config()
        with pytest.raises(ConfigError, match="config.json is not what a run has writ"):
            from_json(tmp_path / "config.json")


@pytest.mark.parametrize(
    "text, kept, reason",
    [
        (b'{"step": 1, "loss": 2.0}\n{"step": 2, "lo', [1], None),
        (b"", [], None),
        (b"5\nnull\n[1]\n", [], "line 1 is not of a step, one of 3"),
        (b'{"step": 1, "loss": 2.0}\n\xff\xfe\n', [1], "line 2 is not of a step"),
        (b'{"loss": 2.0}\n{"step": "1", "loss": 2.0}\n', [], "one of 2"),
        (b'{"step": 1, "loss": 2.0}\n{"step": 9, "loss": 2.0}\n', [1], None),
        (None, [], "cannot be read (Is a directory)"),
    ],
)
def test_metrics_in_any_state_do_not_stop_a_run(text, kept, reason, tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(text) if text is not None else path.mkdir()
    keep_until(path, 5).close()
    assert [x["step"] for x in metrics.read(path)] == kept
    printed = capsys.readouterr().out
    assert (reason or "") in printed and bool(reason) == bool(printed)
    bad = tmp_path / "metrics.jsonl.bad0"
    assert bad.exists() == bool(reason)
    assert not reason or f"kept as {bad.name}" in printed


@pytest.mark.parametrize(
    "step, position, reason",
    [
        (60, {"next_index": 60}, None),
        (50, {"next_index": 60}, "its state has taken 50 steps"),
        *(
            (60, position, f"its place in the data is {position}, after 60 steps")
            for position in (
                *({"next_index": n} for n in (61, 28, 10**14, -5, "x", None)),
                None,
                60,
            )
        ),
    ],
)
def test_a_checkpoint_is_of_the_step_that_it_is_called_by(step, position, reason):
    assert misplaced(step, position, 60) == reason


def takes_signal(process: subprocess.Popen) -> bool:
    """Whether a process has a handler of its own for SIGTERM."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    handled = int(status.split("SigCgt:")[1].split()[0], 16)
    return bool(handled & 1 << (signal.SIGTERM - 1))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_told_to_end_at_any_moment_it_ends_well(saving, tmp_path):
    """The first takes the signal since a moment, the others import or compile."""
    delays = (0, 0.1, 0.4, 1.0, 3.0)
    logs = [tmp_path / f"log{delay}" for delay in delays]
    started = [start(command(saving), log) for log in logs]
    for process, log in zip(started, logs, strict=True):
        wait_for(lambda p=process: takes_signal(p), process, log)
    since = time.monotonic()
    for process, delay in zip(started, delays, strict=True):
        time.sleep(max(0.0, since + delay - time.monotonic()))
        process.terminate()
    for process, log in zip(started, logs, strict=True):
        assert process.wait(60) == 0, log.read_text()
        *_, last = log.read_text().splitlines()
        assert last.startswith("stopped"), log.read_text()
        assert "Traceback" not in log.read_text()
    assert "run:" not in logs[0].read_text(), "the signal is taken before the imports"


@pytest.mark.exhaustive
def test_a_full_disk_ends_the_run_and_says_what_is_saved(saving):
    """A limit on the size of a file stands for the full disk."""
    limited = ["sh", "-c", 'ulimit -f 40; exec "$0" "$@"', *command(saving)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(limited, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 1, done.stderr
    folder = Path(saving.run_dir) / "checkpoints"
    first, last = done.stderr.splitlines()[-2:]
    assert first.startswith(f"error: a checkpoint cannot be written in {folder}: ")
    assert "File too large" in first
    assert last == (
        "Complete are none. Make room, and start again with --run-dir "
        f"{saving.run_dir}: it goes on from the last one."
    )
    assert "Traceback" not in done.stderr


@pytest.mark.exhaustive
def test_killed_at_any_moment_it_goes_on_from_its_last_save(saving, tmp_path):
    """Every step is saved, so nearly every kill is in the middle of a save."""
    config = dataclasses.replace(saving, steps=400, save_every=1)
    delays = random.Random(KILLS)
    last = 0
    for kill in range(KILLS):
        log = tmp_path / f"log{kill}"
        process = start(command(config), log)
        wait_for(lambda n=last: max(saved(config), default=0) > n + 1, process, log)
        time.sleep(delays.uniform(0, 0.5))
        process.kill()
        process.wait()
        if kill:
            assert f"going on after step {last} of" in log.read_text()
        last = saved(config)[-1]
    config = dataclasses.replace(config, steps=last + 3)
    log = tmp_path / "last"
    process = start(command(config), log)
    assert process.wait(300) == 0, log.read_text()
    assert f"going on after step {last} of" in log.read_text()
    whole = dataclasses.replace(config, run_dir=str(tmp_path / "whole"), steps=400)
    process = start(command(whole), tmp_path / "whole_log")
    wait_for(
        lambda: (
            (tmp_path / "whole/metrics.jsonl").exists()
            and len(losses(whole.run_dir)) >= last
        ),
        process,
        tmp_path / "whole_log",
    )
    process.terminate()
    assert process.wait(60) == 0
    expected, found = losses(whole.run_dir), losses(config.run_dir)
    assert [found[k] for k in range(1, last + 1)] == [
        expected[k] for k in range(1, last + 1)
    ]
    assert np.isfinite(list(found.values())).all()
