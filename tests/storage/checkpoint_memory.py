"""In: `save`, `restore`, `export` or `load`, a directory, how many devices, and how
many times as large a state. Out: what that adds to the memory of this process at its
peak, relative to the bytes of the state's shards; a program of its own, so that nothing
else has been in its memory.

CPU devices keep their shards in host memory: saving reads them there, and restoring
makes them there.
"""

import json
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp

import shardfn
from shardfn.storage._stored_array import stored_array
from shardfn.storage.checkpoint import Checkpoints
from shardfn.storage.safetensors import load_safetensors, write_safetensors

NAMES = {
    "even": ("even", "(b c) a -> a b c"),
    "padded": ("padded", "b a -> a b"),
    "flattened": "flattened",
}
"""How the leaves are in a file of others, there in bfloat16."""


def on_disk(times: int) -> dict[str, tuple[int, ...]]:
    """The shapes there, of a state that is so many times as large."""
    return {
        "even": (8192 * times, 1024),
        "padded": (1024, 4093 * times),
        "flattened": (331 * times, 83, 190),
    }


def create(times: int = 1) -> dict[str, jax.Array]:
    shapes = {
        "even": (1024, 1024 * times, 8),
        "padded": (4093 * times, 1024),
        "flattened": (331 * times, 83, 190),
    }
    return {k: jnp.full(shape, 0.5, jnp.float32) for k, shape in shapes.items()}


def memory(what: str) -> int:
    """Bytes: VmRSS now, VmHWM at the peak since the process began."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith(what))
    return int(line.split()[1]) * 1024


def peak_of(run: Callable[[], None]) -> int:
    """At least what `run()` holds more than was held before."""
    before = memory("VmRSS")
    run()
    return memory("VmHWM") - before


def main(action: str, directory: str, devices: str = "8", times: str = "1") -> None:
    jax.config.update("jax_num_cpu_devices", int(devices))
    mesh = jax.make_mesh((int(devices),), ("data",))
    step = shardfn.fully_shard(lambda s, x: (s, x), mesh)
    whole = jax.eval_shape(lambda: create(int(times)))
    own = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(whole))
    states = []

    def save() -> None:
        checkpoints.save(1, states[0])
        checkpoints.wait()

    def restore() -> None:
        states.append(jax.block_until_ready(checkpoints.restore(whole)))

    def export() -> None:
        write_safetensors(f"{directory}/model", states[0], step)

    def load() -> None:
        path = f"{directory}/model.safetensors"
        state = load_safetensors(path, whole, step, names=NAMES)
        states.append(jax.block_until_ready(state))

    with Checkpoints(directory, step) as checkpoints:
        if action == "load":
            small = {"even": jax.ShapeDtypeStruct((2048, 1024), jnp.float32)}
            load_safetensors(f"{directory}/small.safetensors", small, step)
            peak = peak_of(load)
            row = states[0]["padded"][:, 7]
            assert jnp.array_equal(row, jnp.arange(float(len(row))) % 128)
        elif action == "export":
            states.append(step.init(lambda: {"flattened": jnp.ones((331, 83))}))
            export()  # compiles and loads what is needed once
            states[0] = jax.block_until_ready(step.init(create))
            peak = peak_of(export)
        elif action == "save":
            small = step.init(lambda: jnp.ones((331, 83)))
            checkpoints.save(0, small)  # starts threads, loads what is loaded once
            checkpoints.wait()
            states.append(jax.block_until_ready(step.init(create)))
            peak = peak_of(save)
        else:
            checkpoints.restore(jnp.zeros((331, 83)), 0)
            peak = peak_of(restore)
            assert all(
                (s.data <= 0.5).all()
                for s in stored_array(states[0]["flattened"]).addressable_shards
            )
    print(json.dumps({"own": own, "peak": peak / own}))


if __name__ == "__main__":
    main(*sys.argv[1:])
