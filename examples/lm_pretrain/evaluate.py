"""Held-out loss: a state and batches in, nats and perplexity out.

python examples/lm_pretrain/evaluate.py --run-dir runs/NAME --devices 8
"""

import dataclasses
import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import machine
import tyro
from config import ConfigError, from_json
from data import heldout_batches, pack
from documents import DataError, load_documents, split
from saving import SaveError, read_last
from step import eval_step
from tokens import load_tokenizer

import shardfn


@dataclasses.dataclass(frozen=True)
class Heldout:
    """The loss on held-out text, summed over its tokens, in nats."""

    nats: float
    tokens: int
    bytes: int

    @property
    def per_byte(self) -> float:
        """Comparable between tokenizers."""
        return self.nats / self.bytes

    @property
    def perplexity(self) -> float:
        """Of a token: the number of equally likely choices with the same loss."""
        return math.exp(min(self.nats / self.tokens, 700.0))


def evaluate(
    eval_step: Callable, state: Any, batches: Iterable[Any], size: int
) -> Heldout:
    """Returns the loss over all batches; `size` is the bytes of their text."""
    nats = tokens = 0.0
    for batch in batches:
        metrics = eval_step(state, batch)
        nats += float(metrics["total"])
        tokens += float(metrics["count"])
    return Heldout(nats, int(tokens), size)


@dataclasses.dataclass(frozen=True)
class Flags:
    """Prints the loss of a run's last checkpoint on the text that it held out."""

    run_dir: str
    devices: int | None = None
    """Make this many CPU devices; none stands for the devices that JAX finds."""
    best: bool = False
    """Of the checkpoint with the lowest held-out loss, in place of the last."""


def main(flags: Flags) -> tuple[int, Heldout]:
    """Returns the number of the checkpoint, and its loss. Parameters alone are
    read, each device its shards."""
    config = from_json(Path(flags.run_dir) / "config.json")
    alone = dict(devices=flags.devices, coordinator=None, plain=False)
    config = dataclasses.replace(config, process_count=1, process_id=0, **alone)
    machine.start(config)
    config.check_devices(jax.device_count())
    on = machine.prepare(config)
    like = on.abstract_state
    parts, run = {"params": like.params}, Path(flags.run_dir)
    number, read = read_last(run, on.train, parts, flags.best)
    step = shardfn.fully_shard(
        lambda params, batch: eval_step(like.replace(params=params), batch),
        on.train.mesh,
    )
    tokenizer = load_tokenizer(config.data)
    text = pack(split(load_documents(config.data))[1], tokenizer)
    batches = heldout_batches(text, config.model.context, on.share)
    return number, evaluate(step, read["params"], batches, text.bytes)


if __name__ == "__main__":
    try:
        number, loss = main(tyro.cli(Flags))
    except (ConfigError, DataError, SaveError, shardfn.ShardingError) as error:
        sys.exit(f"error: {error}")
    print(
        f"step {number}: held-out loss {loss.per_byte:.3f} nats/byte (perplexity "
        f"{loss.perplexity:.2f} per token)"
    )
