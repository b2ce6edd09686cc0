"""Where numbers of a run go: a progress bar, JSON lines, TensorBoard and a plot."""

import contextlib
import datetime
import json
import time
from pathlib import Path
from typing import Any

import flops
from config import Config, ConfigError
from files import put_away, write_whole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from step import make_schedule

PRINT_SECONDS = 10
"""Between two lines, where the output is no terminal and a bar would not move."""


class Metrics:
    """Writes the metrics of a run's steps; a context manager.

    Lines of `metrics.jsonl` after step `done` are dropped: that run was cut off, and
    this one takes those steps again.
    """

    def __init__(self, config: Config, folder: Path, done: int, writes: bool = True):
        self.config, self.folder = config, folder
        self.writes = writes  # one process of several does
        self.step = self.measured = done
        self.since: float | None = None
        self.started = time.perf_counter()
        self.schedule = make_schedule(config.optimizer, config.steps)
        self.speed = 0.0
        self.peak = flops.peak()
        self.flops_per_token = flops.per_token(config.model)
        self.stack = contextlib.ExitStack()
        if writes:
            kept = read(folder / "metrics.jsonl")
            times = [line.get("seconds", 0.0) for line in kept if line["step"] <= done]
            self.before = max(times, default=0.0)  # of the runs that this one goes on
            self.file = self.stack.enter_context(
                keep_until(folder / "metrics.jsonl", done)
            )
            self.heldout = self.stack.enter_context(
                keep_until(folder / "heldout.jsonl", done)
            )
            self.board = self.tensorboard(done) if config.log.tensorboard else None
        self.progress = Progress(
            TextColumn("train"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
        )
        self.shows_bar = writes and self.progress.console.is_terminal
        self.printed: float | None = None
        if self.shows_bar:
            self.stack.enter_context(self.progress)
        elif writes:
            print(f"compiling; every step: {folder / 'metrics.jsonl'}", flush=True)
        self.task = self.progress.add_task(
            *("train", True, config.steps), completed=done, numbers="compiling"
        )

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.stack.close()

    def tensorboard(self, done: int) -> Any:
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise ConfigError(
                "--log.tensorboard needs the package `tensorboardX`: "
                "pip install tensorboardX"
            ) from None
        writer = SummaryWriter(str(self.folder / "tensorboard"), purge_step=done + 1)
        return self.stack.enter_context(writer)

    def add(self, step: int, loss: float, grad_norm: float) -> None:
        """Notes the metrics of step number `step`, counted from 1."""
        now = time.perf_counter()
        if self.since is None:  # the first step also compiles: time starts after it
            self.since, self.measured = now, step
        else:
            tokens = (
                (step - self.measured)
                * self.config.batch_size
                * self.config.model.context
            )
            self.speed = tokens / max(now - self.since, 1e-9)
        last = step == self.config.steps
        if not self.writes or (step % self.config.log.every and not last):
            return
        numbers = {
            "step": step,
            "loss": loss,
            "grad_norm": grad_norm,
            "tokens_per_second": self.speed,
            "mfu": self.mfu,
            "memory_bytes": flops.memory_in_use(),
            "learning_rate": float(self.schedule(step - 1)),
            "tokens": step * self.config.batch_size * self.config.model.context,
            "seconds": self.elapsed,
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        self.write(json.dumps(numbers) + "\n")
        if self.board:
            for name, value in numbers.items():
                if name not in ("step", "time") and value is not None:
                    self.board.add_scalar(name, value, step)
        self.progress.update(self.task, completed=step, numbers=self.line(numbers))
        due = self.printed is None or now >= self.printed + PRINT_SECONDS
        if not self.shows_bar and (due or last):
            self.printed = now
            print(f"step {step}/{self.config.steps}  {self.line(numbers)}", flush=True)

    def add_heldout(self, step: int, per_token: float, per_byte: float) -> None:
        """Notes the loss on held-out text, in nats, after a step."""
        if not self.writes:
            return
        line = {"step": step, "loss": per_token, "per_byte": per_byte}
        self.write(json.dumps(line) + "\n", self.heldout)
        if self.board:
            self.board.add_scalar("heldout_loss", per_token, step)
        self.progress.console.print(
            f"step {step}/{self.config.steps}  held-out loss {per_token:.3f} per token"
            f"  {per_byte:.3f} per byte"
        )

    def write(self, line: str, file: Any = None) -> None:
        file = file or self.file
        try:
            file.write(line)
            file.flush()
        except OSError as error:  # which file it was is in no message of Python's
            raise OSError(error.errno, error.strerror, file.name) from None

    def left(self, step: int) -> str:
        """How long the run has taken, and still takes at its speed."""
        if not self.speed:
            return ""
        tokens = self.config.batch_size * self.config.model.context
        seconds = (self.config.steps - step) * tokens / self.speed
        return f"  {clock(self.elapsed)} + {clock(seconds)} left"

    @property
    def elapsed(self) -> float:
        """Seconds of this run, and of those that it goes on."""
        return self.before + time.perf_counter() - self.started

    @property
    def mfu(self) -> float | None:
        """Share of the devices' peak; None where the peak is not known."""
        return self.speed * self.flops_per_token / self.peak if self.peak else None

    def line(self, numbers: dict[str, Any]) -> str:
        used = f"{self.speed * self.flops_per_token / 1e9:,.1f} GFLOP/s"
        if numbers["mfu"] is not None:
            used = f"MFU {numbers['mfu']:.1%}"
        speed = f"{self.speed:,.0f} tokens/s  {used}  " if self.speed else ""
        return (
            f"loss {numbers['loss']:.3f}  grad {numbers['grad_norm']:.2f}  {speed}"
            f"{numbers['memory_bytes'] / 1e9:.1f} GB{self.left(numbers['step'])}"
        )


def clock(seconds: float) -> str:
    """Hours, minutes and seconds."""
    return str(datetime.timedelta(seconds=round(seconds)))


def keep_until(path: Path, done: int) -> Any:
    """Opens JSON lines to add to, without those of steps after `done`. What no run has
    written does not hinder this one: it is kept under another name."""
    found, bad = read_all(path)
    if bad:
        name = put_away(path).name
        print(f"{path}: {bad}; kept as {name}, the run goes on", flush=True)
    kept = [line for line in found if line["step"] <= done]
    write_whole(path, "".join(json.dumps(line) + "\n" for line in kept))
    return path.open("a")


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the metrics of a run, those that can be read."""
    return read_all(path)[0]


def read_all(path: Path) -> tuple[list[dict[str, Any]], str]:
    """Returns the metrics of a run, and what is wrong with the file, if anything; a
    last line that was cut off is no more than left out."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return [], ""
    except OSError as error:
        return [], f"cannot be read ({error.strerror})"
    found, bad = [], []
    for number, line in enumerate(lines, 1):
        try:
            numbers = json.loads(line)
        except ValueError:  # also what is not UTF-8
            numbers = None
        if is_of_step(numbers):
            found.append(numbers)
        elif line.endswith(b"\n"):
            bad.append(number)
    return found, f"line {bad[0]} is not of a step, one of {len(bad)}" if bad else ""


def is_of_step(numbers: Any) -> bool:
    """Whether this is what `Metrics` writes for a step."""
    if not isinstance(numbers, dict) or type(numbers.get("step")) is not int:
        return False
    return numbers["step"] > 0 and isinstance(numbers.get("loss"), float)


def plot(folder: Path) -> str:
    """Draws the loss of every step; returns a sentence that says where it is."""
    try:
        import matplotlib
    except ImportError:
        return "no plot: it needs the package `matplotlib` (pip install matplotlib)"
    matplotlib.use("agg")
    from matplotlib import pyplot

    lines = read(folder / "metrics.jsonl")
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot([x["step"] for x in lines], [x["loss"] for x in lines], linewidth=1)
    if held := read(folder / "heldout.jsonl"):
        label = "held-out text"
        axes.plot(
            [x["step"] for x in held], [x["loss"] for x in held], "o-", label=label
        )
        axes.legend()
    axes.set(xlabel="step", ylabel="loss, nats per token", title=folder.name)
    axes.grid(alpha=0.3)
    path = folder / "loss.png"
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return f"loss of every step: {path}"
