"""What making a state takes on one H100, compiled without any: its shards, and the
temporary memory of the programs that make them. The state is that of
`examples/lm_pretrain`: parameters and two moments in float32.

    python benchmarks/init_memory.py
"""

import functools
import math
import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "lm_pretrain"))

import jax
from config import PRESETS, OptimizerConfig
from jax.sharding import NamedSharding, PartitionSpec
from step import create_state, train_step

import shardfn
from shardfn.analysis import targets
from shardfn.storage import _init_state

CASES = (("1b", "h100:8"), ("8b", "h100:8"), ("8b", "h100:64"))
HEADER = ("preset", "devices", "shards", "largest leaf", "programs", "temporary")


def mebibytes(size: float) -> str:
    return f"{size / 2**20:,.2f} MiB"


def row(preset: str, target: str) -> tuple[str, ...]:
    create = functools.partial(
        create_state,
        model=PRESETS[preset],
        optimizer=OptimizerConfig(),
        steps=1000,
    )
    mesh = targets.mesh(target, ("data",), None)
    storage = shardfn.fully_shard(train_step, mesh).storage
    key = jax.random.key(0)
    leaves, _ = storage.leaves((jax.eval_shape(create, key),))
    make, shardings, sizes = storage.stored_init(create, leaves)
    everywhere = NamedSharding(mesh, PartitionSpec())
    abstract = jax.ShapeDtypeStruct((), key.dtype, sharding=everywhere)
    found = list(_init_state.programs(make, shardings, sizes, (abstract,)))
    memory = [program.memory_analysis() for _, program in found]
    own = sum(m.output_size_in_bytes for m in memory)
    numbers = own, max(sizes), max(m.temp_size_in_bytes for m in memory)
    own, largest, temporary = map(mebibytes, numbers)
    count = math.prod(mesh.shape.values())
    return preset, f"{count} x H100", own, largest, str(len(found)), temporary


if __name__ == "__main__":
    for cells in (HEADER, ["---"] * len(HEADER), *(row(*case) for case in CASES)):
        print("| " + " | ".join(cells) + " |", flush=True)
