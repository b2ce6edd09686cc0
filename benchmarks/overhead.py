"""What a sharded call costs the host over the same call under plain `jax.jit`:
a state of many small leaves and next to no arithmetic.

Times are of the CPU in the calling thread, so waiting for devices does not count. The
two programs alternate in rounds, in either order by chance, as what one leaves in the
caches of the CPU slows the other; the last column is the median of the differences of
rounds. Over more than one
device the plain step takes the same sharded arrays, so that both start as many
executables.

    python benchmarks/overhead.py
"""

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp

import shardfn

ROUND = 5
"""Calls of one program in a row."""
HEADER = ("devices", "leaves", "plain jit", "shardfn", "more per call")

jax.config.update("jax_num_cpu_devices", 8)


def train_step(state: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], Any]:
    return [leaf + 1 for leaf in state], {"sum": x.sum()}


def milliseconds(run: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    start = time.thread_time()
    out = run(*args)
    spent = time.thread_time() - start
    return jax.block_until_ready(out)[0], 1e3 * spent


def row(devices: int, leaves: int, calls: int) -> tuple[str, ...]:
    """One line of the table."""
    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
    sharded = shardfn.fully_shard(train_step, mesh, min_size=0)
    state = [jnp.zeros(8) for _ in range(leaves)]
    here, there = sharded.shard(state), sharded.shard(state)
    plain = jax.jit(
        train_step, donate_argnums=0, out_shardings=(sharded.shardings(state), None)
    )
    x = jax.device_put(jnp.ones(8), jax.tree.leaves(sharded.shardings(jnp.ones(8)))[0])
    states, programs = [here, there], [plain, sharded]
    chance, rounds = random.Random(0), []
    for _ in range(calls // ROUND + 1):
        times = [0.0, 0.0]
        for which in chance.sample((0, 1), 2):
            each = []
            for _ in range(ROUND):
                states[which], spent = milliseconds(programs[which], states[which], x)
                each.append(spent)
            times[which] = statistics.median(each)
        rounds.append(times)
    # The first calls compile.
    a, b = (statistics.median(column) for column in zip(*rounds[1:], strict=True))
    more = statistics.median(b - a for a, b in rounds[1:])
    return str(devices), str(leaves), f"{a:.2f} ms", f"{b:.2f} ms", f"{more:.2f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--leaves", type=int, default=600)
    parser.add_argument("--calls", type=int, default=200)
    arguments = parser.parse_args()
    print("  ".join(name.rjust(13) for name in HEADER))
    for devices in (1, 8):
        cells = row(devices, arguments.leaves, arguments.calls)
        print("  ".join(cell.rjust(13) for cell in cells), flush=True)


if __name__ == "__main__":
    main()
