"""Bytes on the wire, memory and overlap of a GPT step, compiled for devices that are
not there: shardfn beside `jit` with NamedSharding on the same unedited step.

Everything printed is read off the plan or the compiled program, so it is deterministic
except the compile time. Needs the extra `aot`.

    python benchmarks/communication.py                 # both cases below, H100
    python benchmarks/communication.py --case 7b --target h100:64
    python benchmarks/communication.py --case 7b --html page.html    # one page
"""

import argparse
import os
import sys
import time
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "lm_pretrain"))

import jax
import jax.numpy as jnp
from config import ModelConfig, OptimizerConfig
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from step import create_state, train_step

import shardfn
from shardfn.analysis import targets
from shardfn.analysis._hlo import overlapped_bytes, read_collectives, wire_bytes


def gpt(layers: int, width: int, heads: int, context: int, vocabulary: int):
    return ModelConfig(
        family="gpt",
        layers=layers,
        width=width,
        heads=heads,
        mlp_width=4 * width,
        context=context,
        vocabulary=vocabulary,
    )


CASES = {
    "0.2b": (gpt(12, 1024, 16, 1024, 50304), "h100:8", 64),
    "7b": (gpt(32, 4096, 32, 4096, 32000), "h100:64", 64),
}
MIN_SIZE = 2**14
"""Leaves with fewer elements stay replicated: `fully_shard`'s default."""

HEADER = ("program", "wire GiB", "wire / M", "overlapped", "temp GiB", "compile s")


def measure(name: str, lowered: jax.stages.Lowered, parameters: int) -> tuple[str, ...]:
    """One row of the table: what the compiled program moves and holds."""
    start = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    collectives = read_collectives(compiled.as_text())
    wire = wire_bytes(collectives)
    temp = compiled.memory_analysis().temp_size_in_bytes
    return (
        name,
        f"{wire / 2**30:.2f}",
        f"{wire / parameters:.2f}",
        f"{overlapped_bytes(collectives) / max(wire, 1):.0%}",
        f"{temp / 2**30:.2f}",
        f"{seconds:.0f}",
    )


def largest(leaf: jax.ShapeDtypeStruct, mesh: Mesh) -> NamedSharding:
    """How the baseline stores a leaf, as is usual: split on the largest dimension that
    the devices divide."""
    dims = [d for d, size in enumerate(leaf.shape) if size % mesh.size == 0]
    if leaf.size < MIN_SIZE or not dims:
        return NamedSharding(mesh, PartitionSpec())
    before = [None] * max(dims, key=lambda d: leaf.shape[d])
    return NamedSharding(mesh, PartitionSpec(*before, "data"))


def run(case: str, target: str | None, html: Path | None) -> None:
    model, default_target, rows = CASES[case]
    target = target or default_target
    mesh = targets.mesh(target)
    optimizer = OptimizerConfig()

    def create(key: jax.Array):
        return create_state(key, model, optimizer, 100)

    state = jax.eval_shape(create, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((rows, model.context), jnp.int32)
    names = ("inputs", "targets", "segments", "positions")
    batch = {name: tokens for name in names}
    step = shardfn.fully_shard(train_step, mesh)
    if html:
        html.write_text(step.on(target, state, batch).html(), encoding="utf-8")
        return
    plan = step.plan(state, batch)
    m = plan.parameter_bytes
    print(
        f"\n{case} on {target}, batch {rows} x {model.context}, M = {m / 2**30:.2f} GiB"
    )
    print(f"plan: {plan.wire_bytes / 2**30:.2f} GiB = {plan.wire_bytes / m:.2f} M")
    rows_of_table = [HEADER, measure("shardfn", step.lower(state, batch), m)]
    automatic = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,))
    stored = jax.tree.map(lambda leaf: largest(leaf, automatic), state)
    split = NamedSharding(automatic, PartitionSpec("data"))
    baseline = jax.jit(
        train_step,
        in_shardings=(stored, split),
        out_shardings=(stored, None),
        donate_argnums=0,
    )
    rows_of_table.append(
        measure("jit + NamedSharding", baseline.lower(state, batch), m)
    )
    for row in rows_of_table:
        print("  ".join(c.rjust(11) if i else c.ljust(19) for i, c in enumerate(row)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--target", help="such as h100:8 or tpu:v5e:2x4")
    parser.add_argument("--html", type=Path, help="write the page of shardfn's step")
    arguments = parser.parse_args()
    for case in arguments.case or CASES:
        run(case, arguments.target, arguments.html)


if __name__ == "__main__":
    main()
