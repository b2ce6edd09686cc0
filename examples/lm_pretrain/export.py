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
import numpy as np
import tyro
from config import Config, ConfigError, from_json, rebuild, to_json
from models import Params

from shardfn.checkpoint import Checkpoints


@dataclasses.dataclass(frozen=True)
class Flags:
    """Writes weights, and the run's choices, to one file."""

    run_dir: str
    out: str


def main(flags: Flags) -> None:
    library = safetensors()
    config = from_json(Path(flags.run_dir) / "config.json")
    folder = (Path(flags.run_dir) / "checkpoints").absolute()
    with Checkpoints(folder) as checkpoints:
        number = checkpoints.latest
        state = checkpoints.restore(machine.abstract_state(config), number)
    named, _ = jax.tree_util.tree_flatten_with_path(state.params)
    tensors = {".".join(k.key for k in path): np.asarray(x) for path, x in named}
    library.numpy.save_file(tensors, flags.out, {"config": to_json(config)})
    print(f"{len(tensors)} tensors of step {number} in {flags.out}")


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
        import safetensors.numpy
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
