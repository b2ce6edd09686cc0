"""A job of four tasks on a real SLURM trains the language model: one task is killed,
the job goes back into the queue, and resumes.

`KILLS=1 pytest tests/examples/test_lm_slurm.py` runs it as root where Debian's packages
`slurm-wlm` and `munge` are, in about two minutes on two busy cores.
"""

import dataclasses
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from test_lm_saving import ROOT, command, losses, saved

sys.path.insert(0, str(Path(__file__).parents[1] / "multiprocess" / "slurm"))
from cluster import cluster, missing, queued, submit  # noqa: E402

SCRIPT = ROOT / "examples" / "lm_pretrain" / "slurm.sh"
SECONDS = 200
TASKS = 4


@pytest.mark.slow
@pytest.mark.standard_promotion
@pytest.mark.skipif("KILLS" not in os.environ, reason="KILLS=1 runs it")
@pytest.mark.skipif(bool(missing()), reason="slurm-wlm and munge are not installed")
def test_a_job_of_which_a_task_is_killed_is_requeued_and_resumes(tiny, tmp_path):
    run = dataclasses.replace(tiny, steps=120, save_every=10)
    flags = ["--coordinator", "auto", "--devices", "1"]
    with cluster(tmp_path / "slurm") as env:
        log = tmp_path / "job.out"
        env = env | {"PYTHONPATH": str(ROOT)}
        submit(env, tmp_path, SCRIPT, *command(run, *flags), tasks=TASKS)
        wait_for(lambda: max(saved(run), default=0) >= 20, log)
        before = losses(run.run_dir)
        tasks = of_this_run(str(run.run_dir))
        assert len(tasks) == TASKS
        os.kill(tasks[1], signal.SIGKILL)
        wait_for(lambda: "going on after step" in log.read_text(), log)
        wait_for(lambda: not queued(env), log)
    text = log.read_text()
    assert "goes back into the queue" in text
    after = losses(run.run_dir)
    assert sorted(after) == list(range(1, run.steps + 1))
    kept = int(text.split("going on after step ")[1].split()[0])
    assert 20 <= kept < run.steps
    assert all(before[k] == after[k] for k in before if k <= kept)


def of_this_run(run_dir: str) -> list[int]:
    """The tasks that train there: their command lines name the folder, and they were
    started by slurmstepd."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
            by = Path(f"/proc/{parent}/comm").read_text().strip()
        except OSError:  # it has ended
            continue
        trains = b"python" in words[0] and run_dir.encode() in words
        if trains and by == "slurmstepd":
            found.append(int(process.name))
    return sorted(found)


def wait_for(condition, log: Path) -> None:
    since = time.monotonic()
    while not condition():
        text = log.read_text() if log.exists() else "nothing yet"
        assert time.monotonic() < since + SECONDS, text
        time.sleep(0.2)
