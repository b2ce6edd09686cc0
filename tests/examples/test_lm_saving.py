"""The language model example is ended in every way, and goes on from its last save.

`KILLS=20 pytest tests/examples/test_lm_saving.py -k killed` kills it more often.
"""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from config import Config, ConfigError
from metrics import Metrics
from saving import SaveError, check_same, complete
from train import main

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
        check_same(saving, folder.parent)


def test_a_run_goes_on_with_the_choices_and_the_text_that_it_began_with(saving, text):
    main(dataclasses.replace(saving, steps=2))
    with pytest.raises(ConfigError) as caught:
        main(dataclasses.replace(saving, batch_size=16))
    assert str(caught.value) == (
        f"--batch-size 16: the run in {saving.run_dir} was started with 8. Give that, "
        "or another --run-dir."
    )
    Path(text).write_text(Path(text).read_text().replace("Line 7", "Line 8"))
    with pytest.raises(ConfigError) as caught:
        main(saving)
    assert str(caught.value) == (
        f"the text is not what it was at checkpoint 2 in {saving.run_dir}/checkpoints. "
        "Bring it back, or give another --run-dir."
    )


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
