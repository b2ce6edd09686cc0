"""A SLURM of one node on this machine, from Debian's packages `slurm-wlm` and `munge`.

In: an empty folder. Out: a running munged, slurmctld and slurmd with all of their files
in it, and the environment in which `sbatch` finds them; all of them end with the
context. `python cluster.py FOLDER SCRIPT [ARGUMENT ...]` submits one batch script,
waits for it and prints what it wrote. Needs root, as slurmd does.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
SECONDS = 60
"""In which each daemon answers, and in which all have ended."""

CONF = """
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SwitchType=switch/none
KillWait=5
ReturnToService=2
SchedulerParameters=requeue_setup_env_fail
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE OverSubscribe=FORCE:4
"""


def missing() -> list[str]:
    """The programs that this machine lacks."""
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    return [name for name in PROGRAMS if shutil.which(name, path=path) is None]


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Starts the daemons, and ends them."""
    folder = folder.absolute()
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    conf = folder / "slurm.conf"
    conf.write_text(
        CONF.format(
            host=socket.gethostname(),
            folder=folder,
            controller=_free_port(),
            node=_free_port(),
            cpus=os.cpu_count(),
        )
    )
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    env = os.environ | {"PATH": path, "SLURM_CONF": str(conf)}
    running: list[subprocess.Popen[Any]] = []

    def start(*command: str) -> None:
        with (folder / f"{command[0]}.out").open("wb") as log:
            out: Any = {"stdout": log, "stderr": log, "start_new_session": True}
            running.append(subprocess.Popen(command, env=env, **out))

    try:
        start(*_munged(folder))
        _until(lambda: (folder / "munge.socket").exists(), folder)
        start("slurmctld", "-D", "-c", "-f", str(conf))
        start("slurmd", "-D", "-c", "-f", str(conf))
        _until(lambda: _states(env) == {"idle"}, folder)
        yield env
    finally:
        with contextlib.suppress(subprocess.SubprocessError):
            subprocess.run(
                ["scancel", "--full", "--user", "root"], env=env, timeout=SECONDS
            )
            _until(lambda: not queued(env), folder)
        for process in reversed(running):
            process.send_signal(signal.SIGTERM)
        for process in running:
            try:
                process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def submit(
    env: dict[str, str], folder: Path, script: Path, *arguments: str, tasks: int = 4
) -> str:
    """Submits a batch script that writes to `folder`/job.out; the job's number. Its
    tasks share what cores there are."""
    env = env | {"SLURM_OVERCOMMIT": "1"}
    command = ["sbatch", "--parsable", "--open-mode=append", "--export=ALL"]
    command += ["--output", str(folder / "job.out"), "--chdir", str(folder)]
    command += ["--ntasks", str(tasks), "--overcommit"]
    out = subprocess.run(
        [*command, str(script), *arguments],
        env=env,
        check=True,
        capture_output=True,
        text=True,
    )
    return out.stdout.strip()


def queued(env: dict[str, str]) -> str:
    """What of jobs is queued or runs."""
    command = ["squeue", "--noheader", "--format", "%i %T %r"]
    out = subprocess.run(command, env=env, capture_output=True, text=True)
    return out.stdout.strip()


def _munged(folder: Path) -> list[str]:
    """The command that runs munged with a key and a socket of its own. It refuses a
    folder that others may write to, such as one in /tmp, unless forced."""
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    return [
        *("munged", "--foreground", "--force", "--key-file", str(key)),
        *("--socket", str(folder / "munge.socket")),
        *("--pid-file", str(folder / "munged.pid")),
        *("--log-file", str(folder / "munged.log")),
        *("--seed-file", str(folder / "munged.seed")),
    ]


def _states(env: dict[str, str]) -> set[str]:
    """The states of the nodes."""
    command = ["sinfo", "--noheader", "--format", "%T"]
    out = subprocess.run(command, env=env, capture_output=True, text=True)
    return set(out.stdout.split())


def _until(done: Callable[[], bool], folder: Path) -> None:
    since = time.monotonic()
    while not done():
        if time.monotonic() > since + SECONDS:
            logs = [f"{p.name}:\n{p.read_text()[-2000:]}" for p in folder.glob("*.log")]
            raise TimeoutError("SLURM does not answer.\n" + "\n".join(logs))
        time.sleep(0.3)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def main() -> None:
    folder, script = Path(sys.argv[1]), Path(sys.argv[2]).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    with cluster(folder) as env:
        submit(env, folder, script, *sys.argv[3:])
        while queued(env):
            time.sleep(1)
    print((folder / "job.out").read_text())


if __name__ == "__main__":
    main()
