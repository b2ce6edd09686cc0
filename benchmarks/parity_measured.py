"""Whether steps compute on the GPUs of this machine what they compute on one device.

Each of several processes has one GPU. Together they train the programs of
tests/programs, some with options or on two mesh axes, and compare every leaf of every
step with the plain step's, which each process runs on its own GPU. Processes may be
more than the GPUs, and share them: that takes NCCL 2.30 or newer, and shows nothing
about speed. Rows are kept in `results/`, also if the time is up; the next run goes on
behind them.

    python benchmarks/parity_measured.py                 # one process for each GPU
    python benchmarks/parity_measured.py --processes 4 --seconds 300
    python benchmarks/parity_measured.py --program llama --option prefetch
    python benchmarks/parity_measured.py --cpu --processes 2 --program llama  # tries it
"""

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from criteria_table import markdown

HERE = Path(__file__).parent
RESULTS = HERE / "results"
sys.path.insert(0, str(HERE.parent / "tests"))

STEPS = 3
MIN_SIZE = 8
NARROW = 6e-2
"""Of updates in proportion to gradients that were rounded to eight bits or sixteen."""
GIVES_UP = 120
"""Seconds after its time in which a process ends what it has begun."""
PLAIN = "none"
SCANNED = ("gpt_scan_remat", "gpt_unrolled_remat", "llama_scan_remat")
LINEAR = ("mlp_pytree_sgd", "opt_sgd", "opt_momentum")
"""Adam makes of a gradient near zero, rounded, a step in the other direction."""
OPTIONS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    PLAIN: ({}, ()),
    "prefetch=1": ({"prefetch": 1}, SCANNED),
    "reshard_after_forward=False": ({"reshard_after_forward": False}, SCANNED),
    "bucket_bytes=1 MiB": ({"bucket_bytes": 2**20}, SCANNED),
    "offload to the host": ({"offload": {"*": "host"}}, SCANNED),
    "two mesh axes": ({}, SCANNED),
    "reduce_dtype=bfloat16": ({"reduce_dtype": "bfloat16"}, LINEAR),
    "gather_dtype=int8": ({"gather_dtype": "int8"}, LINEAR),
}
"""What `fully_shard` is given, by its name in the table, and which programs are run
with it; without any, all are."""
PASSED_ON = ("cpu", "program", "option", "rerun")
"""What each process is given of this script's options."""
COLUMNS = ("option", "programs", "equal", "decided by rounding", "differ")
Row = dict[str, Any]


def path_of(kind: str) -> Path:
    """Where rows of a kind of GPU are kept."""
    return RESULTS / re.sub(r"\W+", "-", kind.lower()) / "parity.json"


def kept(kind: str) -> list[Row]:
    """The rows of a kind of GPU that were measured before."""
    path = path_of(kind)
    return json.loads(path.read_text()) if path.exists() else []


def equal(rows: list[Row], about: Row) -> set[tuple[str, str]]:
    """Programs and options that need no second run, of rows measured alike."""
    return {
        (row["program"], row["option"])
        for row in rows
        if "error" not in row and about.items() <= row.items()
    }


def runs(only: list[str] | None, option: str | None) -> list[tuple[str, str]]:
    """Programs and options, those of different kinds first."""
    import programs

    every = programs.names()
    spread = [name for start in range(5) for name in every[start::5]]
    found = [
        (name, with_option)
        for with_option, (_, names) in OPTIONS.items()
        for name in names or spread
    ]
    found.sort(key=lambda run: run[1] == PLAIN)
    return [
        (name, with_option)
        for name, with_option in found
        if (not only or name in only) and option in (None, with_option)
    ]


def check(name: str, option: str) -> Row:
    """What the comparison said of a program, and how long it took."""
    import jax
    import programs

    from shardfn.testing import assert_parity

    program, start = programs.get(name), time.perf_counter()
    given: dict[str, Any] = {"min_size": MIN_SIZE, **OPTIONS[option][0]}
    sizes: tuple[int, ...] = (jax.device_count(),)
    axes: tuple[str, ...] = ("data",)
    if option == "two mesh axes":
        sizes, axes = (2, jax.device_count() // 2), ("replica", "data")
        given["axis"] = axes
    if program.batch_spec is not None:
        given["batch_spec"] = program.batch_spec
    state = jax.jit(program.init)(jax.random.key(0))
    narrow = "dtype" in option
    row: Row = {"tol": max(program.tol, NARROW) if narrow else program.tol}
    try:
        assert_parity(
            *(program.step, jax.make_mesh(sizes, axes), state, program.batch(0)),
            steps=STEPS,
            tol=row["tol"],
            ignore=[noisy.pattern for noisy in program.noisy],
            **given,
        )
    except Exception as error:
        row["error"] = str(error).strip() or type(error).__name__
        if not isinstance(error, AssertionError):
            row["error"] += "\n" + traceback.format_exc()
    return row | {"s": round(time.perf_counter() - start, 1)}


def one(index: int, spec: Row) -> None:
    """A process: joins the others, and writes each row as soon as it is there."""
    import warnings

    import jax

    own = None if spec["cpu"] else [index % spec["gpus"]]
    if spec["cpu"]:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Products in float32, which GPUs else compute in TF32.
    jax.config.update("jax_default_matmul_precision", "highest")
    jax.distributed.initialize(
        spec["address"], spec["processes"], index, local_device_ids=own
    )
    kind, gpus = jax.local_devices()[0].device_kind, spec["gpus"]
    about = {"jax": jax.__version__, "kind": kind, "gpus": gpus}
    about["processes"] = spec["processes"]
    with Path(spec["out"], f"{index}.jsonl").open("w") as out:
        done = set() if spec["cpu"] or spec["rerun"] else equal(kept(kind), about)
        for name, option in runs(spec["program"], spec["option"]):
            if (name, option) in done:
                continue
            if time.time() > spec["until"]:
                break
            if index == 0:
                print(f"{name}: {option}", file=sys.stderr, flush=True)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                found = check(name, option)
            texts = [str(warning.message) for warning in said]
            decided = [text for text in texts if "not compared, as rounding" in text]
            row = {"program": name, "option": option, **about, **found}
            out.write(json.dumps(row | {"decided": decided}) + "\n")
            out.flush()


def measure(given: argparse.Namespace, gpus: int) -> list[Row]:
    """The rows of the first process, with what others found if it is another thing."""
    count = given.processes or gpus
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        spec = {
            **{name: getattr(given, name) for name in PASSED_ON},
            "gpus": gpus,
            "processes": count,
            "address": f"localhost:{port}",
            "until": time.time() + given.seconds,
            "out": folder,
        }
        own = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        if count > gpus and not given.cpu:
            own["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        started = [
            subprocess.Popen(
                [sys.executable, __file__, "--one", str(i), json.dumps(spec)],
                env=os.environ | own,
            )
            for i in range(count)
        ]
        for process in started:
            try:
                process.wait(given.seconds + GIVES_UP)
            except subprocess.TimeoutExpired:
                process.kill()
        found = [
            [json.loads(line) for line in path.read_text().splitlines()]
            for path in sorted(Path(folder).glob("*.jsonl"))
        ]
    first, *others = found
    for at, row in enumerate(first):
        errors = [r[at].get("error") if at < len(r) else "ended" for r in others]
        if any(error != row.get("error") for error in errors):
            row["error"] = f"processes differ: {[row.get('error'), *errors]}"
    return first


def table(rows: list[Row]) -> str:
    """A line for each option."""
    lines = []
    for option in OPTIONS:
        of = [row for row in rows if row["option"] == option]
        if of:
            wrong = [row["program"] for row in of if "error" in row]
            decided = [row["program"] for row in of if row["decided"]]
            equal, named = str(len(of) - len(wrong)), ", ".join(decided)
            lines.append((option, str(len(of)), equal, named, ", ".join(wrong)))
    return markdown(COLUMNS, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, help="default: as many as GPUs")
    parser.add_argument("--program", action="append")
    parser.add_argument("--option", choices=OPTIONS)
    parser.add_argument("--seconds", type=float, default=3600.0, help="at most")
    parser.add_argument("--rerun", action="store_true", help="kept rows, too")
    parser.add_argument("--cpu", action="store_true", help="tries it; no row is kept")
    parser.add_argument("--kept", action="store_true", help="measures nothing")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        one(int(given.one[0]), json.loads(given.one[1]))
        return
    if given.kept:
        for path in sorted(RESULTS.glob("*/parity.json")):
            rows = json.loads(path.read_text())
            print(f"{about(rows)}\n\n{table(rows)}")
        return
    gpus = given.processes or 2
    if not given.cpu:
        listed = subprocess.run(
            ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=True
        )
        gpus = len(listed.stdout.splitlines())
    rows = measure(given, gpus)
    print(f"{about(rows)}\n\n{table(rows)}")
    for row in rows:
        if "error" in row:
            print(f"\n{row['program']}, {row['option']}: {row['error']}")
    if rows and not given.cpu:
        path = path_of(rows[0]["kind"])
        new = {(row["program"], row["option"]) for row in rows}
        old = [
            r for r in kept(rows[0]["kind"]) if (r["program"], r["option"]) not in new
        ]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(old + rows, indent=1) + "\n")


def about(rows: list[Row]) -> str:
    """What the rows were measured on."""
    found = {(r["processes"], r["gpus"], r["kind"], r["jax"]) for r in rows}
    return "; ".join(
        f"{processes} processes on {gpus} {kind}, JAX {version}"
        for processes, gpus, kind, version in sorted(found)
    )


if __name__ == "__main__":
    main()
