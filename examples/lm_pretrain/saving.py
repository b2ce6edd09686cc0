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
from config import Config, ConfigError, to_json
from data import Packed
from jax.errors import JaxRuntimeError
from jax.experimental import multihost_utils
from machine import Machine

import shardfn
from shardfn.storage.checkpoint import Checkpoints, DamagedCheckpointError

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


class Saves:
    """The checkpoints in a run's folder; a context manager."""

    def __init__(self, config: Config, folder: Path, on: Machine, text: Packed):
        self.folder = folder / "checkpoints"
        self.step = on.train if isinstance(on.train, shardfn.ShardedStep) else None
        self.abstract_state = on.abstract_state
        self.fingerprint = zlib.crc32(text.tokens_N.tobytes())
        self.keep = config.keep
        self.open()

    def open(self) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=self.keep)
        self.checkpoints = Checkpoints(self.folder, self.step, options=options)

    def __enter__(self) -> "Saves":
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.wait()
            self.checkpoints.close()

    def save(self, number: int, state: Any, position: Mapping[str, Any]) -> None:
        """Starts to write; an error of the save before it ends the run here."""
        extra = {"position": dict(position), "text": self.fingerprint}
        self.guard(lambda: self.checkpoints.save(number, state, extra), number)

    def wait(self) -> None:
        self.guard(self.checkpoints.wait, None)

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
        numbers = self.checkpoints.numbers
        for number in reversed(numbers):
            try:
                extra = self.checkpoints.extra(number)
                text, position = extra["text"], extra["position"]
                state = self.checkpoints.restore(self.abstract_state, number)
            except DamagedCheckpointError as error:
                self.set_aside(number, error)
                continue
            except Exception as error:  # whatever the machine or Orbax raises
                raise SaveError(
                    f"checkpoint {number} in {self.folder} was not read: "
                    f"{shorten(error)}\nThat need not be for its files, which are "
                    "where they were. Start again with --run-dir "
                    f"{self.folder.parent}, to go on from it."
                ) from error
            if text != self.fingerprint:
                raise ConfigError(
                    f"the text is not what it was at checkpoint {number} in "
                    f"{self.folder}. Bring it back, or give another --run-dir."
                )
            return Resumed(state, number, position)
        refuse_anew(self.folder.parent)
        return None

    def set_aside(self, number: int, error: Exception) -> None:
        """Moves a checkpoint away, so that one of that number can be written again."""
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
        self.checkpoints.close()
        self.open()


def read_last(run: Path, step: shardfn.ShardedStep, like: Any) -> tuple[int, Any]:
    """Returns the number of a run's last checkpoint, and its state."""
    folder = (run / "checkpoints").absolute()
    if not (numbers := complete(folder) if folder.is_dir() else []):
        raise SaveError(f"--run-dir {run}: the run has saved no checkpoint.")
    with Checkpoints(folder, step) as checkpoints:
        try:
            return numbers[-1], checkpoints.restore(like, numbers[-1])
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


def write_whole(path: Path, text: str) -> None:
    """Writes a file that no kill leaves half written."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def check_same(config: Config, folder: Path) -> list[str]:
    """Returns a line for each choice that a run in `folder` was not started with;
    raises ConfigError where it has to go on with the old one, and SaveError where it
    would start anew."""
    refuse_anew(folder)
    path = folder / "config.json"
    if not path.exists() or not any(folder.glob("checkpoints/*/")):
        return []
    try:
        before = flags(json.loads(path.read_text()))
    except ValueError as error:
        raise ConfigError(
            f"{path} is not what a run has written ({error}). Bring it back, or give "
            "another --run-dir."
        ) from None
    lines = []
    for flag, new in flags(json.loads(to_json(config))).items():
        old = before.get(flag)
        if old == new or flag in MAY_CHANGE:
            continue
        if flag.split(".")[0] in SAME:
            raise ConfigError(
                f"{flag} {new}: the run in {folder} was started with {old}. Give "
                "that, or another --run-dir."
            )
        lines.append(f"changed:   {flag} {new}, which was {old}{EFFECT.get(flag, '')}")
    return lines


def flags(choices: Mapping[str, Any], prefix: str = "--") -> dict[str, Any]:
    """Returns nested choices by the names of their flags."""
    found = {}
    for key, value in choices.items():
        flag = prefix + key.replace("_", "-")
        nested = isinstance(value, dict)
        found |= flags(value, f"{flag}.") if nested else {flag: value}
    return found
