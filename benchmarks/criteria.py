"""The table of criteria: bytes, memory, overlap and compile time of models at their
true sizes, compiled for H100s and TPU v5ps that are not there, beside what a JAX user
has without this library.

Rows are kept in `results/`, for each version of JAX, and measured only where they are
missing; all but seconds are the same in every run. Each row takes 5 s to 6 minutes on
one core. Needs the extra `aot`.

    python benchmarks/criteria.py                            # the table
    python benchmarks/criteria.py --case gpt-1.3b-8 --chip h100 --rerun
    python benchmarks/criteria.py --rows                     # every figure behind it
    python benchmarks/criteria.py --jax 0.12                 # the table of another JAX
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
from criteria_cases import CASES, CHIPS, Case
from criteria_measure import BASELINES, OURS, measure, programs_of
from criteria_table import rows_table, verdicts_table

RESULTS = Path(__file__).parent / "results"
RUN = RESULTS / "cpu" / "run.json"
Rows = dict[str, dict[str, Any]]


WITH_JAX = "0.10"
"""The JAX whose rows are in a chip's own folder."""


def path_of(case: Case, chip: str, version: str) -> Path:
    """Where rows are kept that are measured with a version of JAX."""
    minor = ".".join(version.split(".")[:2])
    folder = chip if minor == WITH_JAX else f"{chip}-jax-{minor}"
    return RESULTS / folder / f"{case.name}.json"


def read(case: Case, chip: str, version: str = jax.__version__) -> Rows:
    path = path_of(case, chip, version)
    return json.loads(path.read_text()) if path.exists() else {}


def keep(case: Case, chip: str, program: str, row: dict[str, Any]) -> None:
    rows = read(case, chip) | {program: row}
    ordered = {p: rows[p] for p in programs_of(case, chip) if p in rows}
    path = path_of(case, chip, jax.__version__)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(ordered, indent=1) + "\n")


def run(words: list[str], limit: int) -> dict[str, Any]:
    """Measures one row in a process of its own, for at most `limit` seconds."""
    command = [sys.executable, __file__, "--one", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"error": f"not compiled in {limit} s"}
    if done.returncode:
        return {"error": f"failed: {done.stderr.strip().splitlines()[-1][:300]}"}
    return json.loads(done.stdout.splitlines()[-1])


def run_all(wanted: list[tuple[Case, str, str]], *, rerun: bool, limit: int) -> None:
    missing = [w for w in wanted if rerun or w[2] not in read(w[0], w[1])]
    for at, (case, chip, program) in enumerate(missing, 1):
        start = time.perf_counter()
        row = run([case.name, chip, program], limit)
        keep(case, chip, program, row)
        took = time.perf_counter() - start
        note = row.get("error", "")
        head = f"[{at}/{len(missing)}] {case.name} {chip} {program}: {took:.0f} s"
        print(f"{head} {note}".rstrip(), file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--chip", choices=CHIPS, action="append")
    parser.add_argument("--program", action="append", help="or a part of its name")
    parser.add_argument("--rerun", action="store_true", help="measure kept rows again")
    parser.add_argument("--kept", action="store_true", help="measure nothing")
    parser.add_argument("--jax", help="the version whose kept rows to print")
    parser.add_argument("--rows", action="store_true", help="every figure")
    parser.add_argument("--run", action="store_true", help="run criterion 7 again")
    parser.add_argument("--limit", type=int, default=600, help="seconds for a row")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one == ["run"]:
        from criteria_run import run as run_here

        print(json.dumps(run_here()))
        return
    if arguments.one:
        name, chip, program = arguments.one
        print(json.dumps(measure(CASES[name], chip, program)))
        return
    cases = [CASES[name] for name in arguments.case or CASES]
    pairs = [(c, chip) for c in cases for chip in arguments.chip or CHIPS]
    wanted = [
        (case, chip, program)
        for case, chip in pairs
        for program in programs_of(case, chip)
        if any(
            p == program or (p in program and p not in (*OURS, *BASELINES))
            for p in arguments.program or [""]
        )
    ]
    kept = arguments.kept or arguments.jax is not None
    if not kept:
        run_all(wanted, rerun=arguments.rerun, limit=arguments.limit)
    if arguments.run or not (arguments.case or kept or RUN.exists()):
        RUN.write_text(json.dumps(run(["run"], arguments.limit), indent=1) + "\n")
    version = arguments.jax or jax.__version__
    measured = {(c.name, chip): read(c, chip, version) for c, chip in pairs}
    if arguments.rows:
        print(rows_table(measured))
    else:
        real = json.loads(RUN.read_text()) if RUN.exists() else {}
        print(verdicts_table(measured, {} if arguments.case else real))


if __name__ == "__main__":
    main()
