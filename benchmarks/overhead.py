"""What a sharded call costs the host over the same call under plain `jax.jit`:
a state of many small leaves and next to no arithmetic.

Times are of the CPU in the calling thread, so waiting for devices does not count. The
two programs alternate in rounds, in either order by chance, as what one leaves in the
caches of the CPU slows the other; the last column is the median of the differences of
rounds. Over more than one device the plain step takes the same sharded arrays, so that
both start as many executables. The batch is one array on the mesh that every call is
given, or one that is made for each, on the mesh or NumPy's.

Devices of this machine compute on the core that calls, which evicts what a call needs
from its caches. `--cold` does that to one device: between calls it writes `COLD` bytes.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --cold
    JAX_PLATFORMS=cuda python benchmarks/overhead.py    # on the GPUs of this machine
"""

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

import shardfn

ROUND = 5
"""Calls of one program in a row."""
ROWS = 48
"""Rows of the batch: no leaf of the state has shards like its."""
COLD = 2**26
"""More than the caches of a core hold."""
HEADER = ("devices", "leaves", "batch", "plain jit", "shardfn", "more per call")
BATCHES = ("the same", "new", "NumPy's")

jax.config.update("jax_num_cpu_devices", 8)


def train_step(state: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], Any]:
    return [leaf + 1 for leaf in state], {"sum": x.sum()}


def milliseconds(run: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    start = time.thread_time()
    out = run(*args)
    spent = time.thread_time() - start
    return jax.block_until_ready(out)[0], 1e3 * spent


def row(
    devices: int, leaves: int, batch: str, calls: int, cold: bool = False
) -> tuple[str, ...]:
    """One line of the table.

    Args:
      devices: of the mesh.
      leaves: of the state.
      batch: one of `BATCHES`.
      calls: how many of each program are timed.
      cold: whether something else is in the caches when a call begins.
    """
    other = np.zeros(COLD if cold else 0, np.uint8)
    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
    sharded = shardfn.fully_shard(train_step, mesh, min_size=0)
    state = [jnp.zeros(8) for _ in range(leaves)]
    here, there = sharded.shard(state), sharded.shard(state)
    ones = np.ones(ROWS, np.float32)
    split = jax.tree.leaves(sharded.shardings(jnp.ones(ROWS)))[0]
    same = jax.device_put(ones, split)

    def x() -> Any:
        if batch == "the same":
            return same
        return ones.copy() if batch == "NumPy's" else jax.device_put(ones, split)

    shardings = sharded.shardings(state)
    plain = jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(shardings, split),
        out_shardings=(shardings, None),
    )
    states, programs = [here, there], [plain, sharded]
    chance, rounds = random.Random(0), []
    for _ in range(calls // ROUND + 1):
        times = [0.0, 0.0]
        for which in chance.sample((0, 1), 2):
            each = []
            for _ in range(ROUND):
                args = states[which], x()
                other += 1
                states[which], spent = milliseconds(programs[which], *args)
                each.append(spent)
            times[which] = statistics.median(each)
        rounds.append(times)
    # The first calls compile.
    a, b = (statistics.median(column) for column in zip(*rounds[1:], strict=True))
    more = statistics.median(b - a for a, b in rounds[1:])
    times = f"{a:.2f} ms", f"{b:.2f} ms", f"{more:.2f} ms"
    return str(devices), str(leaves), batch, *times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--leaves", type=int, default=600)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--cold", action="store_true")
    arguments = parser.parse_args()
    print("  ".join(name.rjust(13) for name in HEADER))
    leaves, calls = arguments.leaves, arguments.calls
    most = 1 if arguments.cold else len(jax.devices())
    for devices in sorted({1, most}):
        for batch in BATCHES:
            cells = row(devices, leaves, batch, calls, arguments.cold)
            print("  ".join(cell.rjust(13) for cell in cells), flush=True)


if __name__ == "__main__":
    main()
