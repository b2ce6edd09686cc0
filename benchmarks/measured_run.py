"""One program of `measured.py` in; its row out. Runs in a process of its own, as what
devices JAX sees is settled once.

Lowers, says so, and waits for a line on standard input, so that the next program gets
ready while one is measured. What is on the GPU is on it alone.
"""

import functools
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
WARM = 2
"""Steps before those that are timed."""
TOKENS = 256
"""Token numbers are below this, which every vocabulary is above."""


def measure(spec: Row) -> Row:
    """Compiles and runs a program.

    Args:
      spec: the case, the program, how many devices it is for and how many of its steps
        are timed.

    Returns:
      Its row.
    """
    if spec["devices"] > 1:
        from stand_ins import stand_in

        stand_in(spec["devices"])
    import jax
    import measured_kernels
    from measured_cases import lowered_program

    from shardfn.analysis._rates import gpus_of

    here, every = jax.local_devices()[0], jax.devices()
    row: Row = {"jax": jax.__version__, "kind": here.device_kind, "devices": len(every)}
    lowered, state = lowered_program(spec["case"], spec["program"], every)
    print("ready", flush=True)
    if not sys.stdin.readline():
        sys.exit("nobody waits for this row")
    start = time.perf_counter()
    compiled = lowered.compile()
    row["compile_s"] = time.perf_counter() - start
    text, memory = compiled.as_text() or "", compiled.memory_analysis()
    row["temp"] = memory.temp_size_in_bytes
    row["arguments"] = memory.argument_size_in_bytes
    step, state, found = timed(compiled, arguments(lowered, compiled, state), spec)
    row |= found
    row["peak"] = (here.memory_stats() or {}).get("peak_bytes_in_use")
    target = gpus_of(jax.sharding.Mesh(every, ("data",)))
    if target is not None:
        rates = measured_kernels.without_links(target)
        timeline, row["predicted_by"] = measured_kernels.predicted(text, rates)
        row["predicted"] = timeline.seconds
        row["measured_by"] = measured_kernels.measured(text, *traced(step, state))
    return row


def arguments(lowered: Any, compiled: Any, state: Any) -> tuple[Any, ...]:
    """Random parameters and tokens, ones for scales, zeros for the rest, as this device
    stores them.

    Args:
      lowered: the program, which may have lost the names of its leaves.
      compiled: the same; it knows how they are stored.
      state: the state as shapes, with names.
    """
    import jax
    import jax.numpy as jnp

    leaves, tree = jax.tree.flatten(lowered.args_info[0])
    stored = jax.tree.leaves(compiled.input_shardings[0])
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(state)]
    names = paths + ["batch"] * (len(leaves) - len(paths))

    @functools.partial(jax.jit, static_argnums=(1, 2, 3))
    def part(key: jax.Array, name: str, shape: tuple[int, ...], dtype: Any):
        if jnp.issubdtype(dtype, jnp.integer):
            most = TOKENS if name == "batch" else 1
            return jax.random.randint(key, shape, 0, most, dtype)
        if "norm" in name and "opt" not in name:
            return jnp.ones(shape, dtype)
        width = 0.0 if "opt" in name else 0.02
        return width * jax.random.normal(key, shape, dtype)

    arrays = []
    for at, (name, leaf, sharding) in enumerate(
        zip(names, leaves, stored, strict=True)
    ):
        key, shape = jax.random.key(at, impl="rbg"), sharding.shard_shape(leaf.shape)
        own = part(key, name, shape, leaf.dtype)
        arrays.append(
            jax.make_array_from_single_device_arrays(leaf.shape, sharding, [own])
        )
    return jax.tree.unflatten(tree, arrays)


def timed(
    compiled: Callable[..., Any], given: tuple[Any, ...], spec: Row
) -> tuple[Callable[[Any], Any], Any, Row]:
    """Seconds of each step, the host waiting for it; and of one of several started one
    behind the other. Also the step, and the state to go on from."""
    import jax

    state, batch = given
    tree = jax.tree.structure(state)

    def step(state: Any) -> Any:
        state, loss = compiled(state, batch)
        return jax.tree.unflatten(tree, jax.tree.leaves(state)), loss

    seconds: list[float] = []
    for _ in range(WARM + spec["steps"]):
        start = time.perf_counter()
        state, loss = jax.block_until_ready(step(state))
        seconds.append(time.perf_counter() - start)
    start = time.perf_counter()
    for _ in range(spec["steps"]):
        state, loss = step(state)
    jax.block_until_ready(state)
    together = (time.perf_counter() - start) / spec["steps"]
    last = float(loss.addressable_data(0))
    finite = math.isfinite(last)
    row = {"seconds": seconds[WARM:], "together": together, "finite": finite}
    row["loss"] = last if finite else None
    return step, state, row


def traced(step: Callable[[Any], Any], state: Any) -> tuple[Any, float]:
    """The kernels of one more step, under the profiler."""
    import jax
    from measured_kernels import compute_stream

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(step(state))
        [path] = Path(folder).rglob("*.xplane.pb")
        return compute_stream(jax.profiler.ProfileData.from_file(str(path)))


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    Path(given["out"]).write_text(json.dumps(measure(given)))
