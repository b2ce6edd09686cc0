"""Whether steps compute on the GPUs of this machine what they compute on one device.

Each of several processes has one GPU. They train the programs of tests/programs, some
with options and on two mesh axes, and compare every leaf of every step with the plain
step's, which each process runs on its own GPU. If there are more processes than GPUs,
they share them, which takes NCCL 2.30 or newer and shows nothing about speed.
Rows are kept in `results/`.

    python benchmarks/parity_measured.py                  # one process for each GPU
    python benchmarks/parity_measured.py --processes 4    # they share what GPUs are here
    python benchmarks/parity_measured.py --cpu --processes 2 --program mlp_flax_adam
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
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"
sys.path.insert(0, str(HERE.parent / "tests"))

STEPS = 3
BF16, NARROW = 6e-2, 0.1
OPTIONS: dict[str, dict[str, Any]] = {
    "prefetch": {"prefetch": 1},
    "kept": {"reshard_after_forward": False},
    "bucketed": {"bucket_bytes": 2**20},
    "reduced in bfloat16": {"reduce_dtype": "bfloat16"},
    "gathered in int8": {"gather_dtype": "int8"},
    "on the host": {"offload": {"*": "host"}},
    "two axes": {},
}
"""What the `OPTED` are run with besides, by what the table calls it."""
TOLERANCES = {"reduced in bfloat16": BF16, "gathered in int8": NARROW}
OPTED = ("gpt_scan_remat", "gpt_unrolled_remat", "llama_scan_remat")
Row = dict[str, Any]


def runs(chosen: list[str] | None) -> list[tuple[str, str]]:
    """Programs and what they are run with, the most different ones first."""
    import programs

    names = chosen or programs.names()
    plain = [(name, "") for name in names]
    opted = [(name, option) for option in OPTIONS for name in OPTED if name in names]
    spread = [run for start in range(5) for run in plain[start::5]]
    return opted + spread if chosen is None else plain + opted


def check(name: str, option: str) -> Row:
    """One row: what the comparison said, and how long it took."""
    import jax
    import programs

    import shardfn.testing

    program, start = programs.get(name), time.perf_counter()
    given: dict[str, Any] = {"min_size": 8, **OPTIONS.get(option, {})}
    sizes, axes = (jax.device_count(),), ("data",)
    if option == "two axes":
        sizes, axes = (2, jax.device_count() // 2), ("replica", "data")
        given["axis"] = axes
    if program.batch_spec is not None:
        given["batch_spec"] = program.batch_spec
    mesh = jax.make_mesh(sizes, axes)
    state = jax.jit(program.init)(jax.random.key(0))
    tol = max(program.tol, TOLERANCES.get(option, 0.0))
    ignored = [noisy.pattern for noisy in program.noisy]
    row: Row = {"equal": True}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            shardfn.testing.assert_parity(
                *(program.step, mesh, state, program.batch(0)),
                steps=STEPS,
                tol=tol,
                ignore=ignored,
                **given,
            )
        except Exception as error:
            text = str(error).strip() or type(error).__name__
            row = {"equal": False, "error": text[:1500]}
            if not isinstance(error, AssertionError):
                row["trace"] = traceback.format_exc()[-1500:]
    decided = [str(w.message) for w in said if "round" in str(w.message)]
    return row | {"tol": tol, "decided": decided, "s": time.perf_counter() - start}


def one(index: int, spec: Row) -> None:
    """A process: joins the others, and writes a row as soon as it is there."""
    import jax

    if spec["cpu"]:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        own = None
    else:
        own = [index % spec["gpus"]]
    jax.config.update("jax_default_matmul_precision", "highest")
    jax.distributed.initialize(
        spec["address"], spec["processes"], index, local_device_ids=own
    )
    kind = jax.local_devices()[0].device_kind
    about = {"jax": jax.__version__, "kind": kind, "processes": spec["processes"]}
    with Path(spec["out"], f"{index}.jsonl").open("w") as out:
        for name, option in runs(spec["programs"]):
            if time.time() > spec["until"]:
                break
            if index == 0:
                print(f"{name} {option}", file=sys.stderr, flush=True)
            row = about | {"program": name, "option": option} | check(name, option)
            out.write(json.dumps(row) + "\n")
            out.flush()


def measure(given: argparse.Namespace, gpus: int) -> list[Row]:
    """The rows of all programs, each with what the first process found, and which of
    the others found another thing."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        spec = {
            "cpu": given.cpu,
            "gpus": gpus,
            "processes": given.processes or gpus,
            "address": f"localhost:{port}",
            "programs": given.program,
            "until": time.time() + given.seconds,
            "out": folder,
        }
        shared = spec["processes"] > gpus and not given.cpu
        own = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        if shared:
            own["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        started = [
            subprocess.Popen(
                [sys.executable, __file__, "--one", str(i), json.dumps(spec)],
                env=os.environ | own,
            )
            for i in range(spec["processes"])
        ]
        for process in started:
            try:
                process.wait(given.seconds + 120)
            except subprocess.TimeoutExpired:
                process.kill()
        found = [
            [json.loads(line) for line in path.read_text().splitlines()]
            for path in sorted(Path(folder).glob("*.jsonl"))
        ]
    first, *others = found
    for at, row in enumerate(first):
        same = [at < len(rows) and rows[at]["equal"] == row["equal"] for rows in others]
        row |= {"agree": all(same), "gpus": gpus}
    return first


def table(rows: list[Row]) -> str:
    """A line for each thing that programs were run with, and each that differed."""
    lines = []
    for option in dict.fromkeys(row["option"] for row in rows):
        of = [row for row in rows if row["option"] == option]
        equal = sum(row["equal"] and row["agree"] for row in of)
        decided = sum(bool(row["decided"]) for row in of)
        lines.append(
            f"{option or 'no option'}: {len(of)} programs, {equal} equal, "
            f"{decided} with leaves that rounding decides, "
            f"{sum(row['s'] for row in of):.0f} s"
        )
    for row in rows:
        if not row["equal"] or not row["agree"]:
            said = row.get("error", "another process found another thing")
            lines.append(f"  {row['program']} {row['option']}: {said}")
            if "trace" in row:
                lines.append(row["trace"])
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, help="default: as many as GPUs")
    parser.add_argument("--program", action="append")
    parser.add_argument("--seconds", type=float, default=3600.0, help="at most")
    parser.add_argument("--cpu", action="store_true", help="tries it out")
    parser.add_argument("--kept", action="store_true", help="measures nothing")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        one(int(given.one[0]), json.loads(given.one[1]))
        return
    listed = (
        subprocess.run(
            ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False
        )
        if not given.cpu
        else None
    )
    gpus = len(listed.stdout.splitlines()) if listed else given.processes or 2
    rows = measure(given, gpus)
    print(table(rows))
    if not given.cpu and given.program is None and rows:
        kind = re.sub(r"\W+", "-", rows[0]["kind"].lower())
        path = RESULTS / kind / "parity.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
