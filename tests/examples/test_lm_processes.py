"""Several processes train the language model: one is killed, and the rest goes on.

`KILLS=1 pytest tests/examples/test_lm_processes.py` runs it: nine processes start,
which takes about two minutes on two busy cores.
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


def processes(config, count: int, folder: Path, name: str):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    logs = [folder / f"{name}{i}" for i in range(count)]
    several = ["--coordinator", address, "--process-count", str(count)]
    several += ["--heartbeat-seconds", str(HEARTBEAT), "--devices", "1"]
    return logs, [
        start(command(config, *several, "--process-id", str(i)), log)
        for i, log in enumerate(logs)
    ]


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
