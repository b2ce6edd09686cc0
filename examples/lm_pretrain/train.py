"""Trains a language model and prints its held-out loss; flags in, a report out.

python examples/lm_pretrain/train.py --devices 8           # 8 CPU devices, sharded
python examples/lm_pretrain/train.py --plain               # the same on one device
python examples/lm_pretrain/train.py --devices 8 --plan    # what will be communicated
"""

if __name__ == "__main__":  # first: the other imports take seconds
    from stopping import end_when_told

    end_when_told()

import dataclasses
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import jax
import machine
import tyro
from config import Config, ConfigError, describe, to_json, with_preset
from data import heldout_batches, pack, training_batches, unigram_entropy
from documents import DataError, load_documents, split
from evaluate import Heldout, evaluate
from files import write_whole
from loop import Diverged, Trained, train
from machine import Machine
from metrics import Metrics, plot
from models import count_parameters
from profiling import Profile
from saving import SaveError, Saves, fingerprint, refuse_anew
from step import train_step
from stopping import Stopping
from tokens import load_tokenizer

import shardfn


@dataclasses.dataclass(frozen=True)
class Report:
    losses: list[float]  # of each step of this process, nats per token
    heldout: Heldout
    unigram: float  # nats per byte, of the held-out text
    tokens_per_second: float  # without the first step, which compiles; or 0
    folder: Path


def main(config: Config) -> Report | None:
    """Returns None if nothing was trained to the end: `--plan`, or a signal."""
    config.check()
    machine.start(config)
    check_processes("choices", config.lines())
    config.check_devices(jax.device_count())
    tokenizer = load_tokenizer(config.data)
    config.check_vocabulary(tokenizer.size)
    train_texts, heldout_texts = split(load_documents(config.data))
    text, heldout = pack(train_texts, tokenizer), pack(heldout_texts, tokenizer)
    found = ("training", text), ("held-out", heldout)
    check_processes("texts", [f"{name} {fingerprint(x):08x}" for name, x in found])
    on = machine.prepare(config)
    batches = training_batches(text, config.model.context, on.share, config.seed)
    if config.plan:
        print(on.train.plan(on.abstract_state, next(batches)))
        return None
    # Before the training, so that a text that is too short does not show up after it.
    heldout_batches(heldout, config.model.context, on.share)

    def measure(state: Any) -> Heldout:
        batches = heldout_batches(heldout, config.model.context, on.share)
        return evaluate(on.evaluate, state, on.feed(batches), heldout.bytes)

    folder = open_run(config)
    several = jax.process_count() > 1
    with Stopping(several) as stopping, Saves(config, folder, on, text) as saves:
        trained, speed = train_from_last_save(
            config, on, batches, folder, saves, stopping, measure
        )
        if trained.number < config.steps:
            again = f"saved; it goes on with --run-dir {folder}"
            lost = "lost, since --save-every is 0"
            end = again if config.save_every else lost
            print(f"stopped after step {trained.number}, {end}")
            return None
        saves.wait()
        stopping.training = False
        loss = measure(trained.state)
    if config.log.plot and jax.process_index() == 0:
        print(plot(folder))
    unigram = unigram_entropy(heldout_texts)
    return Report(trained.losses, loss, unigram, speed, folder)


def train_from_last_save(
    config: Config,
    on: Machine,
    batches: Any,
    folder: Path,
    saves: Saves,
    stopping: Stopping,
    measure: Callable[[Any], Heldout],
) -> tuple[Trained, float]:
    """Returns what was trained, and tokens per second."""
    resumed = saves.resume()
    done = resumed.done if resumed else 0
    keep_choices(config, folder, resumed.changes if resumed else [])
    if resumed and done >= config.steps:
        print(
            f"the run is complete: it has taken {done} steps, of {config.steps}. Give "
            "more --steps to go on.",
            flush=True,
        )
        return Trained(resumed.state, done, []), 0.0
    if resumed:
        print(f"going on after step {done} of {config.steps}", flush=True)
        batches.set_state(resumed.position)
    state = resumed.state if resumed else on.init()
    is_first = jax.process_index() == 0
    if config.eval_every and config.save_every:
        saves.open_best(done)
    profile = Profile(config.traced(), folder)
    with Metrics(config, folder, done, writes=is_first) as metrics, profile:

        def validate(number: int, state: Any) -> None:
            loss = measure(state)
            metrics.add_heldout(number, loss.nats / loss.tokens, loss.per_byte)
            saves.save_best(number, state, loss.nats / loss.tokens)

        trained = train(
            *(on, state, batches, range(done + 1, config.steps + 1), metrics),
            save=saves.save,
            save_every=config.save_every,
            must_stop=stopping.must_stop,
            validate=validate,
            eval_every=config.eval_every,
            during=profile.step,
        )
    return trained, metrics.speed


def planned() -> tuple[Callable[..., Any], Any, dict[str, jax.ShapeDtypeStruct]]:
    """The step and its arguments, without values: what the default run compiles.

    python -m shardfn plan examples/lm_pretrain/train.py:planned --target h100:8
    """
    config = Config()
    tokens_BxT = jax.ShapeDtypeStruct(
        (config.batch_size, config.model.context), jax.numpy.int32
    )
    names = ("inputs", "targets", "segments", "positions")
    batch = {name: tokens_BxT for name in names}
    return train_step, machine.abstract_state(config), batch


def open_run(config: Config) -> Path:
    """Makes the run's folder, and prints the config."""
    name = config.run_dir or time.strftime("runs/%Y%m%d-%H%M%S")
    folder = Path(name).absolute()
    refuse_anew(folder)
    if jax.process_index() == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / "writable", "")
            (folder / "writable").unlink()
        except OSError as error:
            raise ConfigError(
                f"--run-dir {name}: cannot be written ({error.strerror}). Give another."
            ) from None
        print(describe(config))
        kind = jax.devices()[0].device_kind
        print(
            f"{count_parameters(config.model) / 1e6:,.1f}M parameters, "
            f"{1 if config.plain else jax.device_count()} x {kind}, in {folder}",
            flush=True,
        )
    return folder


def keep_choices(config: Config, folder: Path, changes: list[str]) -> None:
    """Prints what has changed, and writes the choices for generate.py, export.py and
    the next start; that they are the run's own is checked by then."""
    if jax.process_index() == 0:
        print(*changes, sep="\n", end="\n" if changes else "", flush=True)
        write_whole(folder / "config.json", to_json(config))


def check_processes(what: str, lines: list[str]) -> None:
    """Raises in every process if one has other lines."""
    if jax.process_count() > 1:
        shardfn.assert_processes_agree(what, "\n".join(lines))


def sentence(report: Report) -> str:
    loss = report.heldout
    speed = f"; {report.tokens_per_second:,.0f} tokens/s"
    return (
        f"held-out loss {loss.per_byte:.3f} nats/byte (perplexity "
        f"{loss.perplexity:.2f} per token); byte-unigram entropy of the same text "
        f"{report.unigram:.3f} nats/byte{speed if report.tokens_per_second else ''}"
    )


ERRORS = (ConfigError, DataError, Diverged, shardfn.ShardingError)


def leave(message: str, status: int) -> NoReturn:
    """Python's own way out waits for Orbax's threads, which print more."""
    sys.stdout.flush()
    print(message, file=sys.stderr, flush=True)
    os._exit(status)


def show(unraisable: "sys.UnraisableHookArgs") -> None:
    """Shows an error that nobody can catch, unless it is of TensorStore's threads: when
    a write fails, the others under way find that nobody waits for them."""
    if unraisable.object is not None:
        sys.__unraisablehook__(unraisable)


def run(argv: list[str]) -> None:
    # Orbax and TensorStore show what goes wrong in each of their threads and tasks; the
    # first error is raised here as well.
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    sys.unraisablehook = show
    try:
        report = main(tyro.cli(Config, args=argv, default=with_preset(argv)))
    except (SaveError, OSError) as error:
        leave(f"error: {error}", 1)
    except KeyboardInterrupt:
        leave("stopped by a second Ctrl-C: steps since the last save are lost", 130)
    except ERRORS as error:
        sys.exit(f"error: {error}")
    if report and jax.process_index() == 0:
        print(sentence(report))


if __name__ == "__main__":
    run(sys.argv[1:])
