"""Trains a byte-level GPT and prints its held-out loss; flags in, a report out.

python examples/lm_pretrain/train.py --devices 8           # 8 CPU devices, sharded
python examples/lm_pretrain/train.py --plain               # the same on one device
python examples/lm_pretrain/train.py --devices 8 --plan    # what will be communicated
"""

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterable, Iterator

import jax
import tyro
from data import (
    DataError,
    heldout_batches,
    load_documents,
    split,
    training_batches,
    unigram_entropy,
)
from model import ModelConfig
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from step import Batch, OptimizerConfig, TrainState, create_state, eval_step, train_step

import shardfn


@dataclasses.dataclass(frozen=True)
class Config:
    """Trains a byte-level GPT on text, its state sharded over every device."""

    data: tuple[str, ...] = ()
    """UTF-8 files or glob patterns; none stands for Python's help topics."""
    devices: int | None = None
    """Make this many CPU devices; none stands for the devices that JAX finds."""
    plain: bool = False
    """Run the same step on one device, without shardfn."""
    plan: bool = False
    """Print what one step communicates, and stop."""
    steps: int = 300
    batch_size: int = 32
    seed: int = 0
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()


@dataclasses.dataclass(frozen=True)
class Report:
    losses: list[float]  # of each training step, nats per byte
    heldout: float  # nats per byte
    unigram: float  # nats per byte, of the held-out text
    tokens_per_second: float  # without the first step, which compiles


class ConfigError(ValueError):
    """Flags that cannot be run."""


def main(config: Config) -> Report | None:
    check(config)
    if config.devices:
        make_cpu_devices(config.devices)
    train_N, heldout_N = split(load_documents(config.data))
    windows = (config.batch_size, config.model.context)
    batches = training_batches(train_N, *windows, seed=config.seed)
    heldout = heldout_batches(heldout_N, *windows)
    init = functools.partial(
        create_state,
        model=config.model,
        optimizer=config.optimizer,
        steps=config.steps,
    )
    key = jax.random.key(config.seed)
    if config.plain:
        step = jax.jit(train_step, donate_argnums=0)
        evaluate = jax.jit(eval_step, donate_argnums=0)
        state = jax.jit(init)(key)
    else:
        mesh = jax.make_mesh((jax.device_count(),), ("data",))
        step = shardfn.fully_shard(train_step, mesh)
        evaluate = shardfn.fully_shard(eval_step, mesh)
        if config.plan:
            print(step.plan(jax.eval_shape(init, key), next(batches)))
            return None
        state = step.init(init, key)
    state, losses, speed = train(step, state, batches, config.steps)
    loss = mean_loss(evaluate, state, heldout)
    return Report(losses, loss, unigram_entropy(heldout_N), speed)


def check(config: Config) -> None:
    for name in ("steps", "batch_size", "devices"):
        value = getattr(config, name)
        if value is not None and value < 1:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} {value}: give a number above zero.")
    if config.plain and config.plan:
        raise ConfigError("--plan needs shardfn: leave --plain out.")


def make_cpu_devices(count: int) -> None:
    """Works only before JAX's first computation, which starts its devices."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def train(
    step: Callable, state: TrainState, batches: Iterator[Batch], steps: int
) -> tuple[TrainState, list[float], float]:
    """Returns the last state, the loss of every step and tokens per second."""
    losses, started, tokens = [], 0.0, 0
    columns = (
        TextColumn("train"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
    )
    with Progress(*columns) as progress:
        task = progress.add_task("train", total=steps, numbers="compiling")
        for _ in range(steps):
            batch = next(batches)
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
            now = time.perf_counter()
            if not started:
                started = now
            else:
                tokens += batch["inputs"].size
            speed = tokens / max(now - started, 1e-9)
            numbers = f"loss {losses[-1]:.3f}  {speed:,.0f} tokens/s"
            progress.update(task, advance=1, numbers=numbers)
    return state, losses, speed


def mean_loss(evaluate: Callable, state: TrainState, batches: Iterable[Batch]) -> float:
    """Returns nats per byte over all the batches; `state` is used up."""
    total = count = 0.0
    for batch in batches:
        state, metrics = evaluate(state, batch)
        total += float(metrics["total"])
        count += float(metrics["count"])
    return total / count


if __name__ == "__main__":
    try:
        report = main(tyro.cli(Config))
    except (ConfigError, DataError, shardfn.ShardingError) as error:
        sys.exit(f"error: {error}")
    if report:
        print(
            f"held-out loss {report.heldout:.3f} nats/byte; byte-unigram entropy of "
            f"the same text {report.unigram:.3f} nats/byte; "
            f"{report.tokens_per_second:,.0f} tokens/s"
        )
