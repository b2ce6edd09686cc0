"""In: 2 and 4 real processes of 2 CPU devices each, connected by gloo. Out: they train,
save and restore as one process does; processes that differ say so and end.
"""

import contextlib
import json
import math
import os
import re
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiers import exhaustively

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


@pytest.mark.parametrize("count", [2, exhaustively(4)])
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
            f"process {count - 1} has not read the latest checkpoint:",
            "    OSError: cut off",
        ]
    split = sum(4 * math.prod(x.shape) for k, x in second.items() if x.ndim)
    assert sum(process["read"] for process in found) == split + 12 * count, (
        "each reads its own part, and what is not split"
    )
    sums = {k: float(jnp.abs(second[k]).sum()) for k in ("flat", "long")}
    assert found[0]["sums"] == pytest.approx(sums, rel=1e-5)
    assert [process["sums"] for process in found[1:]] == [None] * (count - 1)
    assert [process["many"] for process in found] == [60] + [0] * (count - 1)
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


def test_they_take_what_each_has_on_its_own_device(tmp_path: Path) -> None:
    found = run(2, "given", tmp_path)
    _, second, loss = plain()
    sums = {k: float(jnp.abs(second[k]).sum()) for k in ("flat", "long")}
    assert [process["sums"] for process in found] == [pytest.approx(sums, 1e-5), None]
    for process in found:
        assert process["loss"] == pytest.approx(loss, rel=1e-5)
        assert re.fullmatch(
            r"train_step over {'data': 2}, step 1, state, leaf \w+ \(float32 [x\d]+\): "
            r"relative error .*",
            process["unequal"],
        ), process["unequal"]


def test_processes_that_differ_say_so(tmp_path: Path) -> None:
    found = run(2, "differ", tmp_path)
    for i, process in enumerate(found):
        lines = process["uneven"].splitlines()
        assert lines[0] == f"process {i} and process {1 - i} have different arguments:"
        rows = [line.strip() for line in lines if "leaf 0 of the batch" in line]
        theirs, own = (
            f"leaf 0 of the batch: float32[{8 * (1 + k)},5]" for k in (1 - i, i)
        )
        assert rows == [f"-{theirs}", f"+{own}"]
    for i, error in enumerate(process["error"] for process in found):
        first, *lines = error.splitlines()
        assert first == f"process {i} and process {1 - i} have different plans:"
        assert lines[0].strip() == f"--- process {1 - i}"
        assert any(line.strip().startswith("-program ") for line in lines)
        differ = [line.strip() for line in lines if " sin ->" in line]
        assert differ and differ[0].startswith("-" if i == 0 else "+")
        assert "several_processes.py:" in differ[0], "the line of the user's program"
        assert "was called at several_processes.py:" in error


def test_one_that_does_not_come_is_not_waited_for_in_vain(monkeypatch) -> None:
    class Alone:
        said: dict[str, str] = {}

        def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
            raise RuntimeError("DEADLINE_EXCEEDED: GetKeyValue() timed out")

        def key_value_set(self, key: str, text: str) -> None:
            self.said[key] = text

        def key_value_delete(self, key: str) -> None:
            pass

    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(processes, "_often", Counter())
    monkeypatch.setattr(processes, "_cleared", Counter())
    monkeypatch.setattr(compat, "distributed_client", Alone)
    with pytest.raises(ShardingError) as error:
        processes.meet("compiled the step")
    first, *_, last = str(error.value).splitlines()
    assert first == ("process 0 has compiled the step, and process 1 has not in 600 s.")
    told = json.loads(Alone.said["shardfn/met/0-1/1/0"])
    assert told["late"] == str(error.value), "others that wait are told the same"
    assert last.startswith("Every process has to call the same steps in the same order")


def test_all_have_what_the_first_has(monkeypatch) -> None:
    """What a program is compiled with, however each would make it, twice in a row."""
    board, here, found = Board(), threading.local(), [[], [], []]
    counts = [Counter() for _ in range(3)]
    monkeypatch.setattr(compat, "distributed_client", lambda: board)
    monkeypatch.setattr(processes, "count", lambda: 3)
    monkeypatch.setattr(processes, "index", lambda: here.index)

    def place(numbers: Sequence[int]) -> str:
        counts[here.index]["here"] += 1
        return f"of {len(numbers)}/{counts[here.index]['here']}"

    monkeypatch.setattr(processes, "_next_place", place)

    def run(index: int) -> None:
        here.index = index
        for number in (1, 2):
            text = f"profile {number} of {index}"
            found[index].append(processes.of_the_first("compiled", text))

    threads = [threading.Thread(target=run, args=(i,)) for i in (2, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [["profile 1 of 0", "profile 2 of 0"]] * 3
    monkeypatch.setattr(processes, "count", lambda: 1)
    assert processes.of_the_first("compiled", "own") == "own"


class Board:
    """What processes tell each other, of which each is a thread here."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.changed = threading.Condition()

    def key_value_set(self, key: str, text: str) -> None:
        with self.changed:
            self.texts[key] = text
            self.changed.notify_all()

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.texts, 20):
                raise RuntimeError("DEADLINE_EXCEEDED")
            return self.texts[key]

    def key_value_delete(self, key: str) -> None:
        with self.changed:
            for told in [k for k in self.texts if k.startswith(f"{key}/")]:
                del self.texts[told]


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("kind", ["raises", "leaves out", "differs"])
def test_who_raises_all_do(kind: str, failing: int, monkeypatch) -> None:
    """One of three raises between two meetings, or goes on from an error of its own
    and comes to the next meeting, or says something else: all are told at once, and
    meet again afterwards."""
    board, here = Board(), threading.local()
    monkeypatch.setattr(compat, "distributed_client", lambda: board)
    monkeypatch.setattr(processes, "count", lambda: 3)
    monkeypatch.setattr(processes, "index", lambda: here.index)
    counts = [Counter() for _ in range(3)]
    found: dict[int, list[str]] = {i: [] for i in range(3)}

    class Own:  # what a process of its own would have
        def __getitem__(self, key: str) -> int:
            return counts[here.index][key]

        def __setitem__(self, key: str, value: int) -> None:
            counts[here.index][key] = value

    monkeypatch.setattr(processes, "_often", Own())
    monkeypatch.setattr(processes, "_cleared", Counter())

    def meet(is_odd: bool) -> None:
        if kind == "raises":
            with processes.meeting("read"):
                if is_odd:
                    raise OSError("cut off")
        elif kind == "leaves out":
            processes.meet("saved" if is_odd else "read")
        else:
            processes.assert_processes_agree("seeds", f"a\nseed {int(is_odd)}")

    def run(index: int) -> None:
        here.index = index
        for is_odd in (False, index == failing, False):
            try:
                meet(is_odd)
                found[index].append("well")
            except (OSError, ShardingError) as error:
                found[index].append(str(error))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for index, (before, text, after) in found.items():
        assert (before, after) == ("well", "well")
        if kind == "raises" and index == failing:
            assert text == "cut off"
        elif kind == "raises":
            lines = text.splitlines()
            assert lines[0] == (
                f"process {failing} has failed, and process {index} has read:"
            )
            assert lines[1] == "    OSError: cut off"
        elif kind == "leaves out":
            odd = failing or 1  # the first one is taken for right
            one, other = ("saved", "read") if failing == 0 else ("read", "saved")
            first = f"process 0 has {one}, and process {odd} has {other}."
            assert text.splitlines()[0] == first
        else:
            assert "have different seeds:" in text
            lines = {line.strip() for line in text.splitlines()}
            ways = ({"+seed 0", "-seed 1"}, {"+seed 1", "-seed 0"})
            assert any(way <= lines for way in ways), text
    assert len(board.texts) == 3, "of the last meeting only"


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
