"""In: a port, the number of processes and this one's, and what to do. Out: what this
process finds, as JSON; a program of its own, since JAX connects processes only once.
"""

import json
import sys
from typing import Any

import jax

PORT, COUNT, INDEX, TASK, DIRECTORY = *map(int, sys.argv[1:4]), *sys.argv[4:6]
DEVICES = 1 if TASK == "given" else 2  # per process

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", DEVICES)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{PORT}", COUNT, INDEX)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import shardfn  # noqa: E402
import shardfn.testing  # noqa: E402
from shardfn._core import compat, processes  # noqa: E402
from shardfn.storage import _tensor_files, checkpoint  # noqa: E402
from shardfn.storage._stored_array import stored_array  # noqa: E402
from shardfn.storage.checkpoint import Checkpoints  # noqa: E402
from shardfn.storage.safetensors import (  # noqa: E402
    load_safetensors,
    write_safetensors,
)

ROWS = 8
LEAVES = 60


def create(key: jax.Array) -> dict[str, Any]:
    return {
        "even": jax.random.normal(key, (5, 16)),
        "flat": jax.random.normal(key, (5, 7)),
        "long": jax.random.normal(key, (13, 31)),
        "padded": jax.random.normal(key, (1003,)),
        "key": jax.random.key(5),
        "count": jnp.int32(0),
    }


def train_step(state: Any, x: jax.Array) -> Any:
    def loss_fn(p: Any) -> jax.Array:
        sizes = sum(jnp.square(v).sum() for v in p.values())
        return jnp.square(x @ p["even"]).mean() + sizes * x.mean()

    params = {k: state[k] for k in ("even", "flat", "long", "padded")}
    loss, grads = jax.value_and_grad(loss_fn)(params)
    new = {k: state[k] - 0.1 * grads[k] for k in params}
    return state | new | {"count": state["count"] + 1}, loss


def other_step(state: Any, x: jax.Array) -> Any:
    state, loss = train_step(state, jnp.sin(x))
    return state, loss


def train(step: shardfn.ShardedStep) -> dict[str, Any]:
    x = np.arange(ROWS * 5, dtype=np.float32).reshape(ROWS, 5) / 40
    own = ROWS // COUNT
    batch = step.local_batch(x[INDEX * own : (INDEX + 1) * own])
    state = step.init(create, jax.random.key(0))
    state, _ = step(state, batch)
    with Checkpoints(DIRECTORY, step) as checkpoints:
        checkpoints.save(1, state)
        state, loss = step(state, batch)
        refusal = refuse(checkpoints)
        restored = checkpoints.restore(jax.eval_shape(create, jax.random.key(0)))
    again, _ = step(restored, batch)
    write_safetensors(f"{DIRECTORY}/model.safetensors", state, step)
    loaded, read = load(step)
    same = same_shards(state, again) and same_shards(state, loaded)
    whole = step.unshard(state, process=0)
    sums = whole and {k: float(jnp.abs(whole[k]).sum()) for k in ("flat", "long")}
    return {
        "loss": float(loss),
        "same": same,
        "sums": sums,
        "refusal": refusal,
        "read": read,
        "many": put_together(step.mesh),
    }


def put_together(mesh: jax.sharding.Mesh) -> int:
    """How many leaves the first process has of a state of many; gathers of all of them
    in flight would wait for each other."""
    step = shardfn.fully_shard(lambda state, x: (state, x.sum()), mesh, min_size=0)
    state = step.init(lambda: [jnp.full((64, 64), k) for k in range(LEAVES)])
    whole = step.unshard(state, process=0) or []
    return sum(bool(jnp.all(x == k)) for k, x in enumerate(whole))


def given(step: shardfn.ShardedStep) -> dict[str, Any]:
    """Goes on from a state that each process has made on its own device, some of it
    committed there; and what `assert_parity` says of it."""
    state, x = jax.jit(create)(jax.random.key(0)), jnp.arange(ROWS * 5.0)
    state["even"] = jax.device_put(state["even"], jax.local_devices()[0])
    state["keys"] = jax.random.split(state["key"], 3)
    x = x.reshape(ROWS, 5) / 40
    shardfn.testing.assert_parity(train_step, step.mesh, state, x)
    try:
        shardfn.testing.assert_parity(
            *(train_step, step.mesh, state, x), tol=1e-8, reduce_dtype="bfloat16"
        )
        unequal = "it was not noticed"
    except AssertionError as error:
        unequal = str(error).splitlines()[0]
    stored, _ = step(step.shard(state), x)
    stored, loss = step(stored, step.local_batch(np.asarray(x)[INDEX::COUNT]))
    state, _ = step(state, x)
    state, _ = step(state, x)
    whole = step.unshard(state, process=0)
    sums = whole and {k: float(jnp.abs(whole[k]).sum()) for k in ("flat", "long")}
    return {"loss": float(loss), "sums": sums, "unequal": unequal}


def more_rows(step: shardfn.ShardedStep) -> str:
    """What is said of batches of which the second process has more rows."""
    state, rows = step.init(create, jax.random.key(0)), np.ones((4 * (1 + INDEX), 5))
    try:
        step(state, step.local_batch(rows.astype(np.float32)))
    except shardfn.ShardingError as error:
        return str(error)
    return "it was not refused"


def same_shards(one: Any, other: Any) -> bool:
    """Whether this process's shards have the same bits."""
    return all(
        np.array_equal(a.data, b.data)
        for k in ("even", "flat", "long", "padded")
        for a, b in zip(
            *(stored_array(x[k]).addressable_shards for x in (one, other)), strict=True
        )
    )


def load(step: shardfn.ShardedStep) -> tuple[Any, int]:
    """The state of the file that was written, and how many bytes of values this process
    has read of it, had its disk blocks of one byte."""
    read, count = _tensor_files.read_into, []

    def counted(file: Any, row: Any, start: int) -> None:
        count.append(len(row))
        read(file, row, start)

    _tensor_files.BLOCK_BYTES = 1
    _tensor_files.read_into = counted
    like = jax.eval_shape(create, jax.random.key(0))
    return load_safetensors(f"{DIRECTORY}/model.safetensors", like, step), sum(count)


def alone() -> dict[str, Any]:
    """The last process makes a state, reads one and trains on its own devices, and the
    others do not; then all find what is left of what they told each other."""
    found: dict[str, Any] = {}
    if INDEX == COUNT - 1:
        mesh = jax.sharding.Mesh(jax.local_devices(), ("data",))
        step = shardfn.fully_shard(train_step, mesh, min_size=8)
        state = step.init(create, jax.random.key(0))
        with Checkpoints(DIRECTORY, step) as checkpoints:
            state = checkpoints.restore(state)
        found["alone"] = float(jnp.abs(step.unshard(state)["flat"]).sum())
        step(state, np.zeros((ROWS, 5), np.float32))
    client = compat.distributed_client()
    client.wait_at_barrier("all have come", 60_000)
    left = client.key_value_dir_get("shardfn")
    return found | {"left": [key for key, _ in left]}


def refuse(checkpoints: Checkpoints) -> str:
    """What `restore` raises if the last process alone cannot read."""

    def cut_off(*_: Any) -> None:
        raise OSError("cut off")

    read = checkpoint.read
    if INDEX == COUNT - 1:
        checkpoint.read = cut_off
    try:
        checkpoints.restore(jax.eval_shape(create, jax.random.key(0)))
    except (OSError, checkpoint.CheckpointError) as error:
        return str(error)
    finally:
        checkpoint.read = read
    return "it was not refused"


def main() -> None:
    mesh = jax.make_mesh((COUNT * DEVICES,), ("data",))
    is_other = TASK == "differ" and INDEX == 1
    chosen = other_step if is_other else train_step
    step = shardfn.fully_shard(chosen, mesh, min_size=8)
    processes.PROCESS_SECONDS = 60
    uneven = {"uneven": more_rows(step)} if TASK == "differ" else {}
    try:
        found = given(step) if TASK == "given" else train(step) | alone()
    except shardfn.ShardingError as error:
        found = {"error": str(error)} | uneven
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
