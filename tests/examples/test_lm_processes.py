"""Several processes train the language model: one is killed, and the rest goes on; or
they cannot run together, and all end with a message.

`KILLS=1 pytest tests/examples/test_lm_processes.py` runs it: nine processes start in
each, which takes about two minutes on two busy cores.
"""

import dataclasses
import os
import socket
import time
from pathlib import Path

import pytest
from test_lm_saving import command, losses, saved, start, wait_for

HEARTBEAT = 10
SECONDS = 60
"""In which the others have ended, of which they notice nothing for HEARTBEAT."""


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def processes(config, count: int, folder: Path, name: str, own=None):
    """Starts them, each with flags of its `own`."""
    logs = [folder / f"{name}{i}" for i in range(count)]
    several = ["--coordinator", free_address(), "--process-count", str(count)]
    several += ["--heartbeat-seconds", str(HEARTBEAT), "--devices", "1"]
    ids = [["--process-id", str(i)] for i in range(count)]
    return logs, [
        start(command(config, *several, *flags), log)
        for flags, log in zip(own or ids, logs, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.standard_promotion
@pytest.mark.skipif("KILLS" not in os.environ, reason="KILLS=1 runs it")
def test_processes_that_cannot_run_together_end_with_a_message(tiny, tmp_path, write):
    """Other choices; other texts under the same name; one number twice; and no
    process 0 at that address."""
    other = write("other.txt", b"Other lines.\n" * 900)
    choices = [
        ["--process-id", "0"],
        ["--process-id", "1", "--seed", "3", "--save-every", "7"],
    ]
    texts = [["--process-id", "0"], ["--process-id", "1", "--data.files", other]]
    joins = ["--join-seconds", "12"]
    twice = [[*joins, "--process-id", "1"], [*joins, "--process-id", "1"]]
    away = [
        [*joins, "--process-id", str(i), *(["--coordinator", free_address()] * i)]
        for i in range(2)
    ]
    started = {}
    for name, own in (
        *(("choices", choices), ("texts", texts)),
        *(("twice", [[*joins, "--process-id", "0"], *twice]), ("away", away)),
    ):
        run = dataclasses.replace(tiny, run_dir=str(tmp_path / f"run_{name}"))
        started[name] = processes(run, len(own), tmp_path, name, own)
    said = {}
    for name, (logs, running) in started.items():
        for process in running:
            assert process.wait(4 * SECONDS) != 0  # nine start at once
        said[name] = [log.read_text() for log in logs]
    for text in said["choices"]:
        assert "have different choices:" in text
        lines = {line.strip().lstrip("+-").strip() for line in text.splitlines()}
        assert {'"seed": 0,', '"seed": 3,', '"save_every": 7,'} <= lines
    for text in said["texts"]:
        assert "have different choices:" in text and "other.txt" in text
    assert any("ALREADY_EXISTS" in text for text in said["twice"])
    for text in said["twice"]:
        assert "ALREADY_EXISTS" in text or "not all of --process-count 3 have" in text
    assert "not all of --process-count 2 have joined at" in said["away"][0]
    assert "process 0 cannot be reached at localhost:" in said["away"][1]


@pytest.mark.slow
@pytest.mark.standard_promotion
@pytest.mark.skipif("KILLS" not in os.environ, reason="KILLS=1 runs it")
def test_without_one_process_the_others_end_and_fewer_go_on(tiny, tmp_path):
    config = dataclasses.replace(tiny, steps=5000, save_every=2, batch_size=12)
    logs, running = processes(config, 4, tmp_path, "first")
    wait_for(lambda: max(saved(config), default=0) >= 4, running[0], logs[0])
    running[1].kill()
    killed = time.monotonic()
    for process, log in zip(running, logs, strict=True):
        assert process.wait(SECONDS + killed - time.monotonic()) != 0
        if process is not running[1]:
            assert "another task died" in log.read_text()
    before = losses(config.run_dir)
    for count in (3, 2):
        last = saved(config)[-1]
        logs, running = processes(config, count, tmp_path, f"with{count}_")
        wait_for(lambda n=last: saved(config)[-1] > n, running[0], logs[0])
        running[-1].terminate()  # one is told, and all save and end
        for process, log in zip(running, logs, strict=True):
            assert process.wait(SECONDS) == 0, log.read_text()
            assert f"going on after step {last} of" in log.read_text()
            assert "stopped after step" in log.read_text()
        after = losses(config.run_dir)
        assert sorted(after) == list(range(1, saved(config)[-1] + 1))
        assert all(before[k] == after[k] for k in range(1, last + 1))
        before = after
