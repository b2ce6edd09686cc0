"""Checkpoints of a run: state, place in the data, and what text it was.

A checkpoint whose files are bad is set aside, with a message, for an older one; a run
that has checkpoints, set aside or not, never starts from the beginning by itself.
"""

import json
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from best import FOLDER as BEST, Best
from config import Config, ConfigError, to_json
from data import Packed
from jax.errors import JaxRuntimeError
from jax.experimental import multihost_utils
from machine import Machine

import shardfn
from shardfn.storage.checkpoint import (
    CheckpointError,
    Checkpoints,
    DamagedCheckpointError,
)

SAME = ("--model", "--optimizer", "--data", "--batch-size", "--seed")
"""What a run has to go on with."""
MAY_CHANGE = ("--run-dir", "--preset", "--coordinator", "--process-id")
"""What says nothing about the run."""
EFFECT = {"--steps": ": the learning rate now falls until that step"}
ASIDE = "unreadable"
"""The folder of the checkpoints that were set aside."""


class SaveError(RuntimeError):
    """A checkpoint cannot be written or read."""


class Resumed(NamedTuple):
    state: Any
    done: int  # steps taken
    position: dict[str, Any]  # state of the data iterator
    changes: list[str]  # lines on choices that are not those of the last start


class Saves:
    """The checkpoints in a run's folder; a context manager."""

    def __init__(self, config: Config, folder: Path, on: Machine, text: Packed):
        self.folder = folder / "checkpoints"
        self.step = on.train if isinstance(on.train, shardfn.ShardedStep) else None
        self.abstract_state = on.abstract_state
        self.choices = json.loads(to_json(config))
        self.fingerprint = fingerprint(text)
        self.keep = config.keep
        self.best: Best | None = None
        self.open()

    def open(self) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=self.keep)
        while True:
            try:
                self.checkpoints = Checkpoints(self.folder, self.step, options=options)
                return
            except DamagedCheckpointError as error:
                if error.number is None:
                    raise SaveError(f"{self.folder}: {error}") from error
                self.move(error.number, error)

    def __enter__(self) -> "Saves":
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.wait()
            self.checkpoints.close()
            if self.best:
                self.best.checkpoints.close()

    def save(self, number: int, state: Any, position: Mapping[str, Any]) -> None:
        """Starts to write; an error of the save before it ends the run here."""
        extra = {"position": dict(position), "text": self.fingerprint}
        extra["config"] = self.choices
        self.guard(lambda: self.checkpoints.save(number, state, extra), number)

    def open_best(self, done: int) -> None:
        """Opens the checkpoint with the lowest held-out loss of the first `done`
        steps."""
        self.best = Best(self.folder.parent, self.step, done)

    def save_best(self, number: int, state: Any, loss: float) -> None:
        """Starts to write, if no held-out loss was lower."""
        if best := self.best:
            self.guard(lambda: best.add(number, state, loss), number)

    def wait(self) -> None:
        self.guard(self.checkpoints.wait, None)
        if self.best:
            self.guard(self.best.checkpoints.wait, None)

    def guard(self, write: Any, number: int | None) -> None:
        try:
            write()
        except Exception as error:  # whatever the file system or Orbax raises
            if jax.process_count() > 1 and isinstance(error, JaxRuntimeError):
                raise SaveError(
                    f"another task died while a checkpoint was written in "
                    f"{self.folder}: {shorten(error)}\n"
                    f"Complete are {complete(self.folder) or 'none'}. Start again with "
                    f"any number of processes and --run-dir {self.folder.parent}: they "
                    "go on from the last one."
                ) from error
            raise SaveError(
                f"a checkpoint cannot be written in {self.folder}: {shorten(error)}\n"
                f"Complete are {complete(self.folder) or 'none'}. Make room, and start "
                f"again with --run-dir {self.folder.parent}: it goes on from the last "
                "one."
            ) from error

    def resume(self) -> Resumed | None:
        """Reads the last checkpoint that can be read; None if there is none at all."""
        for number in reversed(self.checkpoints.numbers):
            try:
                extra = self.checkpoints.extra(number)
                changes = self.compare(extra, number)
                state = self.checkpoints.restore(self.abstract_state, number)
            except ConfigError:
                raise
            except DamagedCheckpointError as error:
                self.set_aside(number, error)
                continue
            except CheckpointError as error:  # such as a state of another form
                raise SaveError(f"{error}\nNo file was moved.") from error
            except Exception as error:  # whatever the machine or Orbax raises
                raise SaveError(
                    f"checkpoint {number} in {self.folder} was not read: "
                    f"{shorten(error)}\nThat need not be for its files, which are "
                    "where they were. Start again with --run-dir "
                    f"{self.folder.parent}, to go on from it."
                ) from error
            if reason := misplaced(int(state.step), extra["position"], number):
                self.set_aside(number, SaveError(reason))
                continue
            return Resumed(state, number, extra["position"], changes)
        refuse_anew(self.folder.parent)
        return None

    def compare(self, extra: Mapping[str, Any], number: int) -> list[str]:
        """Lines that say which choices have changed since a checkpoint; ConfigError
        where one or the text must not."""
        changes = compare(extra.get("config"), self.choices, self.folder.parent)
        if extra["text"] != self.fingerprint:
            raise ConfigError(
                f"the text is not what it was at checkpoint {number} in "
                f"{self.folder}. Bring it back, or give another --run-dir."
            )
        return changes

    def set_aside(self, number: int, error: Exception) -> None:
        """Moves a checkpoint away, so that one of that number can be written again."""
        self.move(number, error)
        self.checkpoints.close()
        self.open()

    def move(self, number: int, error: Exception) -> None:
        if jax.process_index() == 0:
            print(
                f"checkpoint {number} in {self.folder} cannot be read, an older one is "
                f"used: {shorten(error)}",
                flush=True,
            )
            place = self.folder.parent / ASIDE / str(number)
            shutil.rmtree(place, ignore_errors=True)
            place.parent.mkdir(exist_ok=True)
            shutil.move(self.folder / str(number), place)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices(f"checkpoint {number} was moved")


def misplaced(step: int, position: Any, number: int) -> str | None:
    """What says that a checkpoint is of another step than its number; each step takes
    one batch."""
    if step != number:
        return f"its state has taken {step} steps"
    if position != {"next_index": number}:
        return f"its place in the data is {position}, after {number} steps"
    return None


def fingerprint(text: Packed) -> int:
    return zlib.crc32(text.tokens_N.tobytes())


def read_last(
    run: Path, step: shardfn.ShardedStep, like: Any, best: bool = False
) -> tuple[int, Any]:
    """Returns the number of a run's last checkpoint, or of its best, and what `like`
    has of its state."""
    folder = (run / (BEST if best else "checkpoints")).absolute()
    if not (numbers := complete(folder) if folder.is_dir() else []):
        raise SaveError(
            f"--run-dir {run}: the run has saved no checkpoint"
            f"{': --eval-every says how often it looks for the best' * best}."
        )
    try:
        with Checkpoints(folder, step) as checkpoints:
            return numbers[-1], checkpoints.restore(like, numbers[-1], partial=True)
    except Exception as error:  # a file of it may be cut off or missing
        raise SaveError(
            f"checkpoint {numbers[-1]} in {folder} cannot be read: {shorten(error)}"
            "\nMove it away to use an older one."
        ) from error


def refuse_anew(run: Path) -> None:
    """Raises SaveError if all that a run has saved was set aside."""
    aside, folder = run / ASIDE, run / "checkpoints"
    moved = complete(aside) if aside.is_dir() else []
    if moved and not (folder.is_dir() and complete(folder)):
        raise SaveError(
            f"none of the checkpoints {moved} in {folder} can be read. They were moved "
            f"to {aside}: bring one back that can, or give another --run-dir."
        )


def shorten(error: Exception) -> str:
    """The first line of an error, and the end of it, where the reason often stands."""
    line = next((x for x in str(error).splitlines() if x.strip()), "")
    if len(line) > 320:
        line = f"{line[:100]} … {line[-200:]}"
    return f"{type(error).__name__}: {line}"


def complete(folder: Path) -> list[int]:
    """Returns the numbers of complete checkpoints: Orbax renames one when it is."""
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit())


def compare(before: Any, now: Mapping[str, Any], folder: Path) -> list[str]:
    """Returns a line for each choice that a run was not started with; raises
    ConfigError where it has to go on with the old ones, and names all."""
    if not isinstance(before, dict):
        raise ConfigError(
            f"the checkpoints in {folder} are of another program. Give another "
            "--run-dir."
        )
    refused, lines = [], []
    old_flags, new_flags = flags(before), flags(now)
    for flag in dict.fromkeys((*new_flags, *old_flags)):
        old, new = shown(old_flags.get(flag)), shown(new_flags.get(flag))
        if old == new or flag in MAY_CHANGE:
            continue
        if flag.split(".")[0] in SAME:
            refused.append(f"{flag} {new}: the run in {folder} was started with {old}.")
        else:
            effect = EFFECT.get(flag, "")
            lines.append(f"changed:   {flag} {new}, which was {old}{effect}")
    if refused:
        told = "that" if len(refused) == 1 else "these"
        raise ConfigError("\n".join(refused) + f" Give {told}, or another --run-dir.")
    return lines


def flags(choices: Mapping[str, Any], prefix: str = "--") -> dict[str, Any]:
    """Returns nested choices by the names of their flags."""
    found = {}
    for key, value in choices.items():
        flag = prefix + key.replace("_", "-")
        nested = isinstance(value, dict)
        found |= flags(value, f"{flag}.") if nested else {flag: value}
    return found


def shown(value: Any) -> str:
    """A value as one would write it behind its flag."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
