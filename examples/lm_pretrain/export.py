"""The weights of a run's last checkpoint, out as one safetensors file, and back.

python examples/lm_pretrain/export.py --run-dir runs/NAME --out model.safetensors
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import jax
import machine
import tyro
from config import Config, ConfigError, from_json, rebuild, to_json
from models import Params
from step import train_step

import shardfn
from shardfn.checkpoint import Checkpoints
from shardfn.export import dotted, write_safetensors


@dataclasses.dataclass(frozen=True)
class Flags:
    """Writes weights, and the run's choices, to one file."""

    run_dir: str
    out: str
    devices: int | None = None
    """Make this many CPU devices; none stands for the devices that JAX finds."""


def main(flags: Flags) -> None:
    config = from_json(Path(flags.run_dir) / "config.json")
    alone = dataclasses.replace(config, devices=flags.devices, coordinator=None)
    machine.start(alone)
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    step = shardfn.fully_shard(train_step, mesh)
    folder = (Path(flags.run_dir) / "checkpoints").absolute()
    with Checkpoints(folder, step) as checkpoints:
        number = checkpoints.latest
        state = checkpoints.restore(machine.abstract_state(config), number)
    choices = {"config": to_json(config)}
    names = write_safetensors(
        flags.out, state, step, names=weight_name, metadata=choices
    )
    print(f"{len(names)} tensors of step {number} in {flags.out}")


def weight_name(path: str) -> str | None:
    """The parameters are written, under their path in the model."""
    within = path.removeprefix("params/")
    return None if within == path else dotted(within)


def read_weights(path: Path) -> tuple[Config, Params]:
    """Returns the choices and the parameters that `main` wrote, on one device."""
    library = safetensors()
    if not path.is_file():
        raise ConfigError(f"--weights {path}: no such file.")
    params: dict[str, Any] = {}
    with library.safe_open(path, "numpy") as file:
        config = rebuild(Config, json.loads(file.metadata()["config"]))
        for name in file.keys():  # noqa: SIM118 - not a dict
            *parents, last = name.split(".")
            place = params
            for part in parents:
                place = place.setdefault(part, {})
            place[last] = jax.numpy.asarray(file.get_tensor(name))
    return config, params


def safetensors() -> Any:
    try:
        import safetensors
    except ImportError:
        raise ConfigError(
            "exported weights need the package `safetensors`: pip install safetensors"
        ) from None
    return safetensors


if __name__ == "__main__":
    try:
        main(tyro.cli(Flags))
    except (ConfigError, FileNotFoundError) as error:
        sys.exit(f"error: {error}")
