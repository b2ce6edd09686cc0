"""Steps with leaves of the state in the memory of the host, run on the devices of this
machine, one GPU or several: seconds of a step with and without, and what the device
held at most, as measured and as predicted. Each program runs in a process of its own.
Rows are kept in `results/`.

    python benchmarks/host_measured.py                 # GPT-1.3B, all devices here
    python benchmarks/host_measured.py --layers 8 --devices 1
    python benchmarks/host_measured.py --tiny          # tries it out, on CPUs, too
    python benchmarks/host_measured.py --kept          # the tables; measures nothing
    python benchmarks/host_measured.py --predict h200:1      # needs the extra `aot`
"""

import argparse
import dataclasses
import functools
import json
import math
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import criteria_programs as programs
import jax
import jax.numpy as jnp
from criteria_cases import GPT_1B, Model
from stationary_table import table

RESULTS = Path(__file__).parent / "results"
PROGRAMS: dict[str, dict[str, Any]] = {
    "device": {},
    "moments": {"offload": {"opt/*": "host"}},
    "all": {"offload": {"*": "host"}},
}
"""What `fully_shard` is asked for, by program."""

TINY = Model("gpt", 2, 128, 2, 64, 512, 512, 16, rows=1)
COLUMNS = (
    *("model", "devices", "on the host", "measured step", "fastest and slowest"),
    *("predicted step", "measured peak", "predicted peak", "offloaded"),
)
Row = dict[str, Any]


def measure(model: Model, devices: int, program: str, steps: int) -> Row:
    """Runs one program on the devices of this machine; a row of JSON."""
    here = jax.devices()[: devices or None]
    mesh = jax.make_mesh((len(here),), ("data",), devices=here)
    step = programs.sharded(model, mesh, **PROGRAMS[program])
    _, shapes = programs.arguments(model, mesh.size)
    state = step.init(functools.partial(programs.create, model))
    batch = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    usual = here[0].default_memory().kind
    on_host = [
        math.prod(x.shape) * x.dtype.itemsize
        for x in jax.tree.leaves(state)
        if x.sharding.memory_kind != usual
    ]
    row: Row = {
        "jax": jax.__version__,
        "kind": here[0].device_kind,
        "devices": mesh.size,
        "model": dataclasses.asdict(model),
        "host": sum(on_host) // mesh.size,
    }
    seconds, loss = [], jnp.zeros(())
    for _ in range(steps + 2):  # the first compiles, the next finds it compiled
        start = time.perf_counter()
        state, loss = jax.block_until_ready(step(state, batch))
        seconds.append(time.perf_counter() - start)
    stats = here[0].memory_stats() or {}
    peak = stats.get("peak_bytes_in_use")
    return row | {"seconds": seconds[2:], "peak": peak, "loss": float(loss)}


def run(model: Model, devices: int, program: str, steps: int) -> Row:
    """Measures one program in a process of its own."""
    words = [json.dumps(dataclasses.asdict(model)), str(devices), program, str(steps)]
    command = [sys.executable, __file__, "--one", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1][:300]}
    return json.loads(done.stdout.splitlines()[-1])


def measured_table(rows: Mapping[str, Row]) -> str:
    """What the programs took."""

    def lines():
        for program, row in rows.items():
            if "error" in row:
                yield [program, *[""] * (len(COLUMNS) - 2), row["error"]]
                continue
            model, seconds = row["model"], row["seconds"]
            ends = min(seconds), max(seconds)
            yield [
                f"{model['family']}, {model['layers']} layers of {model['width']}",
                f"{row['devices']} x {row['kind']}",
                program,
                ms(statistics.median(seconds)),
                " to ".join(map(ms, ends)),
                ms(row["predicted"]) if "predicted" in row else "",
                gib(row["peak"]),
                gib(row["predicted_peak"]) if "predicted_peak" in row else "",
                gib(row["host"]),
            ]

    return table(COLUMNS, lines())


def predict(path: Path, target: str) -> None:
    """Adds to kept rows what `step.on` says of their programs on a machine like that
    they were measured on."""
    from host_memory import report_of

    rows = json.loads(path.read_text())
    for program, row in rows.items():
        report = report_of(Model(**row["model"]), target, program)
        row["predicted"] = report.step_seconds
        row["predicted_peak"] = report.memory.peak
    path.write_text(json.dumps(rows, indent=1) + "\n")


def file_of(kind: str) -> Path:
    """Where rows of a kind of device are kept."""
    return RESULTS / re.sub(r"\W+", "-", kind.lower()) / "host-measured.json"


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms"


def gib(size: int | None) -> str:
    """Devices such as CPUs do not say what they hold."""
    return "not known" if size is None else f"{size / 2**30:,.2f} GiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=GPT_1B.layers)
    parser.add_argument("--devices", type=int, default=0, help="default: all here")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="a toy; no row is kept")
    parser.add_argument("--kept", action="store_true", help="measures nothing")
    parser.add_argument("--predict", metavar="TARGET", help="of kept rows")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        words, devices, program, steps = args.one
        model = Model(**json.loads(words))
        print(json.dumps(measure(model, int(devices), program, int(steps))))
        return
    model = TINY if args.tiny else dataclasses.replace(GPT_1B, layers=args.layers)
    if args.predict:
        chip = args.predict.partition(":")[0]
        for path in RESULTS.glob(f"*{chip}/host-measured.json"):
            predict(path, args.predict)
    if args.predict or args.kept:
        for path in sorted(RESULTS.glob("*/host-measured.json")):
            print(measured_table(json.loads(path.read_text())))
        return
    rows = {p: run(model, args.devices, p, args.steps) for p in PROGRAMS}
    found = [row for row in rows.values() if "error" not in row]
    if found and not args.tiny:
        path = file_of(found[0]["kind"])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(rows, indent=1) + "\n")
    print(measured_table(rows))


if __name__ == "__main__":
    main()
