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
from saving import SaveError, read_last
from step import train_step

import shardfn
from shardfn.storage.safetensors import dotted, write_safetensors


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
    run, like = Path(flags.run_dir), {"params": machine.abstract_state(config).params}
    number, state = read_last(run, step, like)
    choices = {"config": to_json(config)}
    try:
        names = write_safetensors(
            flags.out, state, step, names=weight_name, metadata=choices
        )
    except OSError as error:
        raise ConfigError(
            f"--out {flags.out}: cannot be written ({error.strerror})."
        ) from None
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
    try:
        with library.safe_open(path, "numpy") as file:
            config = rebuild(Config, json.loads((file.metadata() or {})["config"]))
            for name in file.keys():  # noqa: SIM118 - not a dict
                *parents, last = name.split(".")
                place = params
                for part in parents:
                    place = place.setdefault(part, {})
                place[last] = jax.numpy.asarray(file.get_tensor(name))
    except (library.SafetensorError, KeyError) as error:
        raise ConfigError(
            f"--weights {path}: is no file that export.py has written ({error})."
        ) from None
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
    except (ConfigError, SaveError, shardfn.ShardingError) as error:
        sys.exit(f"error: {error}")
