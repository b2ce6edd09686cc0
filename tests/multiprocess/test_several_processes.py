"""In: 2 and 4 real processes of 2 CPU devices each, connected by gloo. Out: they train,
save and restore as one process does; processes that differ say so and end.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from shardfn import ShardingError
from shardfn._core import compat, processes
from shardfn.storage import _write_failures
from shardfn.storage.checkpoint import Checkpoints

PROGRAM = Path(__file__).with_name("several_processes.py")
SECONDS = 240


def run(count: int, task: str, directory: Path) -> list[dict[str, Any]]:
    """What each process found."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    started = [
        subprocess.Popen(
            [sys.executable, PROGRAM, *map(str, (port, count, i, task, directory))],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(count)
    ]
    try:
        outputs = [process.communicate(timeout=SECONDS) for process in started]
    finally:
        for process in started:
            process.kill()
    found = []
    for out, err in outputs:
        lines = [line for line in out.splitlines() if line.startswith("{")]
        assert lines, err[-3000:]
        found.append(json.loads(lines[-1]))
    return found


def plain() -> tuple[Any, Any, float]:
    """The states after one step and after two, and the last loss, of one device."""
    scope: dict[str, Any] = {"__name__": "functions only"}
    text = PROGRAM.read_text()
    definitions = text[text.index("ROWS = ") : text.index("def other_step")]
    exec("import jax, jax.numpy as jnp\nfrom typing import Any\n" + definitions, scope)
    x = np.arange(40, dtype=np.float32).reshape(8, 5) / 40
    step = jax.jit(scope["train_step"])
    first, _ = step(scope["create"](jax.random.key(0)), x)
    second, loss = step(first, x)
    return first, second, float(loss)


@pytest.mark.parametrize("count", [2, 4])
def test_they_compute_what_one_device_does(count: int, tmp_path: Path) -> None:
    found = run(count, "train", tmp_path)
    first, second, loss = plain()
    for process in found:
        assert process["same"], "restored, training goes on with the same bits"
        np.testing.assert_allclose(process["loss"], loss, rtol=1e-5)
        assert len(process["left"]) == count, "of the last restore only"
    assert found[-1]["alone"] == pytest.approx(float(jnp.abs(first["flat"]).sum()))
    *others, last = (process["refusal"] for process in found)
    assert last == "cut off", "only this one cannot read, and none goes on"
    for refusal in others:
        assert refusal.splitlines()[:2] == [
            f"process {count - 1} cannot read its part of checkpoint 1 in {tmp_path}:",
            "    OSError: cut off",
        ]
    sums = {k: float(jnp.abs(second[k]).sum()) for k in ("flat", "long")}
    assert found[0]["sums"] == pytest.approx(sums, rel=1e-5)
    assert [process["sums"] for process in found[1:]] == [None] * (count - 1)
    file = load_file(tmp_path / "model.safetensors")
    assert {k: x.shape for k, x in file.items()} == {
        k: x.shape for k, x in second.items() if k != "key"
    } | {"key": (2,)}
    for k in ("even", "flat", "long", "padded"):
        np.testing.assert_allclose(file[k], second[k], rtol=1e-5, atol=1e-6)
    with Checkpoints(tmp_path) as checkpoints:
        restored = checkpoints.restore(first)
    for k in ("even", "flat", "long", "padded", "count"):
        np.testing.assert_allclose(restored[k], first[k], rtol=1e-5, atol=1e-6)


def test_processes_that_differ_say_so(tmp_path: Path) -> None:
    errors = [process["error"] for process in run(2, "differ", tmp_path)]
    for i, error in enumerate(errors):
        first, *lines = error.splitlines()
        assert first == f"process {i} and process {1 - i} have different plans:"
        assert lines[0].strip() == f"--- process {1 - i}"
        assert any(line.strip().startswith("-program ") for line in lines)
        assert "was called at several_processes.py:" in error


def test_one_that_does_not_come_is_not_waited_for_in_vain(monkeypatch) -> None:
    class Alone:
        def wait_at_barrier(self, name: str, milliseconds: int) -> None:
            raise TimeoutError(name)

    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(compat, "distributed_client", Alone)
    with pytest.raises(ShardingError) as error:
        processes.meet("compiled the step")
    first, *_, last = str(error.value).splitlines()
    assert first == (
        "process 0 has compiled the step, and another one has not in 600 s."
    )
    assert last.startswith("Every process has to call the same steps in the same order")


def test_a_write_that_fails_ends_the_wait_for_the_others() -> None:
    class Full:
        def result(self, timeout: float | None = None) -> None:
            raise OSError("the disk is full")

    others, failures = threading.Event(), []

    def fail() -> None:
        with contextlib.suppress(OSError):
            _write_failures.Watched(Full(), failures).result()

    threading.Timer(0.2, fail).start()
    with pytest.raises(OSError, match="the disk is full"):
        _write_failures.wait(others.wait, failures)
    others.set()
    _write_failures.wait(lambda: None, [])
    with pytest.raises(ZeroDivisionError):
        _write_failures.wait(lambda: 1 / 0, [])
