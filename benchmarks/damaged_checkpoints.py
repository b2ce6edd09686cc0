"""Bits that flip in a checkpoint, and what the checksums that find them cost.

In: nothing. Out: of 100 flipped bits and of 20 blocks of zeros, anywhere in the folder
of a checkpoint, how many are found, how many change nothing that is read, and how many
are read as wrong values; and seconds of saving and restoring with checksums and
without, medians of rounds that take turns.

    python benchmarks/damaged_checkpoints.py

Eight CPU devices write; what is damaged is read onto 8 or 3 devices, or one.
"""

import collections
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shardfn
from shardfn.storage import _orbax_handler
from shardfn.storage.checkpoint import Checkpoints, DamagedCheckpointError

FLIPS, BLOCKS, BLOCK = 100, 20, 4096
ROUNDS, BYTES = 7, 2**28
EXTRA = {"position": {"next_index": 60}, "loss": 0.25}


def create(key: jax.Array) -> dict[str, Any]:
    shapes = {"even": (128, 32), "padded": (2003, 2), "flat": (251, 331), "bias": (7,)}
    keys = jax.random.split(key, len(shapes))
    made: dict[str, Any] = {
        name: jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    half = made["even"].astype(jnp.bfloat16)
    return made | {"half": half, "key": jax.random.key(3), "step": jnp.int32(60)}


def step_on(devices: int) -> shardfn.ShardedStep:
    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
    return shardfn.fully_shard(lambda s, x: (s, x), mesh, min_size=8)


def flip(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def clear(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    start = chance.randrange(max(len(data) - BLOCK, 1))
    data[start : start + BLOCK] = bytes(len(data[start : start + BLOCK]))
    path.write_bytes(data)


def files(folder: Path, chance: random.Random) -> Iterator[Path]:
    """Half of them chosen by their bytes, half of them each as likely as another."""
    there = sorted(p for p in folder.rglob("*") if p.is_file() and p.stat().st_size)
    sizes = [path.stat().st_size for path in there]
    while True:
        yield chance.choices(there, sizes)[0]
        yield chance.choice(there)


def outcomes(
    good: Path, harm: Callable[[Path, random.Random], None], count: int
) -> collections.Counter[str]:
    chance, found = random.Random(0), collections.Counter()
    like = jax.eval_shape(create, jax.random.key(0))
    whole = words(jax.jit(create)(jax.random.key(0)))
    steps = [step_on(8), step_on(3), None]
    chosen = files(good, chance)
    for i in range(count):
        path, step = next(chosen), chance.choice(steps)
        with tempfile.TemporaryDirectory() as folder:
            bad = Path(
                folder, "run"
            )  # TensorStore remembers what it has read of a path
            shutil.copytree(good, bad)
            harm(bad / path.relative_to(good), chance)
            outcome = read(bad, step, like, whole)
        if outcome == "WRONG VALUES":
            print(f"number {i}: {path.relative_to(good)}")
        found[outcome] += 1
    return found


def read(folder: Path, step: Any, like: Any, whole: Any) -> str:
    try:
        with Checkpoints(folder, step) as checkpoints:
            state, extra = checkpoints.restore(like), checkpoints.extra()
    except DamagedCheckpointError:
        return "found"
    state = words(step.unshard(state) if step else state)
    same = jax.tree.all(jax.tree.map(np.array_equal, state, whole))
    return "changed nothing" if same and extra == EXTRA else "WRONG VALUES"


def words(state: Any) -> Any:
    return state | {"key": jax.random.key_data(state["key"])}


def seconds(checks: bool, step: shardfn.ShardedStep, state: Any) -> tuple[float, float]:
    codecs = list(_orbax_handler.CHECKSUM)
    _orbax_handler.CHECKSUM[:] = codecs if checks else codecs[:1]
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            Checkpoints(folder, step) as saves,
        ):
            begin = time.perf_counter()
            saves.save(1, state)
            saves.wait()
            saved = time.perf_counter()
            jax.block_until_ready(saves.restore(state))
            return saved - begin, time.perf_counter() - saved
    finally:
        _orbax_handler.CHECKSUM[:] = codecs


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    with tempfile.TemporaryDirectory() as folder:
        step = step_on(8)
        with Checkpoints(folder, step) as checkpoints:
            checkpoints.save(60, step.init(create, jax.random.key(0)), EXTRA)
        for name, harm, count in (("bits", flip, FLIPS), ("blocks", clear, BLOCKS)):
            found = outcomes(Path(folder), harm, count)
            print(f"{count} {name}: {dict(found)}", flush=True)
    step = step_on(8)
    state = step.init(lambda: jnp.full((BYTES // 4096, 1024), 0.5))
    taken = {checks: [] for checks in (False, True)}
    for i in range(2 * ROUNDS):
        taken[i % 2 == 1].append(seconds(i % 2 == 1, step, state))
    for name, part in (("save", 0), ("restore", 1)):
        without, with_ = (
            statistics.median(x[part] for x in taken[checks]) for checks in taken
        )
        print(
            f"{name} {BYTES >> 20} MiB: {without:.2f} s without checksums, "
            f"{with_:.2f} s with them"
        )


if __name__ == "__main__":
    main()
