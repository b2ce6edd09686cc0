"""Where numbers of a run go: a progress bar, JSON lines, TensorBoard and a plot."""

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import flops
from config import Config, ConfigError
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

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
        self.speed = 0.0
        self.peak = flops.peak()
        self.flops_per_token = flops.per_token(config.model)
        self.stack = contextlib.ExitStack()
        if writes:
            self.file = self.stack.enter_context(
                keep_until(folder / "metrics.jsonl", done)
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
        }
        self.write(json.dumps(numbers) + "\n")
        if self.board:
            for name, value in numbers.items():
                if name != "step" and value is not None:
                    self.board.add_scalar(name, value, step)
        self.progress.update(self.task, completed=step, numbers=self.line(numbers))
        due = self.printed is None or now >= self.printed + PRINT_SECONDS
        if not self.shows_bar and (due or last):
            self.printed = now
            print(f"step {step}/{self.config.steps}  {self.line(numbers)}", flush=True)

    def write(self, line: str) -> None:
        try:
            self.file.write(line)
            self.file.flush()
        except OSError as error:  # which file it was is in no message of Python's
            raise OSError(error.errno, error.strerror, self.file.name) from None

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
            f"{numbers['memory_bytes'] / 1e9:.1f} GB"
        )


def keep_until(path: Path, done: int) -> Any:
    """Opens JSON lines to add to, without those of steps after `done`."""
    kept = [line for line in read(path) if line["step"] <= done]
    new = path.with_suffix(".new")  # a kill in between must not lose the old ones
    new.write_text("".join(json.dumps(line) + "\n" for line in kept))
    new.replace(path)
    return path.open("a")


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the metrics of a run; a line that was cut off is left out."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = []
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


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
    axes.set(xlabel="step", ylabel="loss, nats per token", title=folder.name)
    axes.grid(alpha=0.3)
    path = folder / "loss.png"
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return f"loss of every step: {path}"
