"""What it does to a step when XLA's scheduler for GPUs is told what each kernel and
transfer is predicted to take (`fully_shard(latencies="predicted")`), and to steps that
are sharded by hand when it is told the same of them. Cases of `criteria.py`, compiled
for H100s that are not there (extra `aot`). Rows are kept in `results/`; a new one takes
10 to 60 seconds.

    python benchmarks/latencies.py
    python benchmarks/latencies.py --case gpt-175b-128 --rerun
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import criteria_programs as programs
import jax
from criteria_cases import CASES
from criteria_measure import BASELINES, played
from criteria_table import markdown

from shardfn._api.predicted_latencies import LATENCIES, predicted_latencies
from shardfn.analysis import targets

RESULTS = Path(__file__).parent / "results"
DEFAULT = (
    *("gpt-1.3b-8", "llama-7b-64", "t5-11b-8", "t5-11b-512"),
    *("gpt-175b-128", "gpt-175b-512"),
)
PROGRAMS = ("shardfn", "constrained", "shard_map by hand")
COLUMNS = (
    *("program", "case", "XLA's latencies", "predicted", "of it"),
    *("exposed", "predicted", "peak temporary", "predicted"),
)


def measured(name: str, program: str) -> dict[str, Any]:
    """By whose latencies a program is scheduled: what it is predicted to take."""
    case = CASES[name]
    target = case.target("h100")
    mesh = targets.mesh(target)
    found: dict[str, Any] = {"jax": jax.__version__}
    for which in LATENCIES:
        options: dict[str, Any] = {}
        if program == "shardfn":
            step = programs.sharded(case.model, mesh, latencies=which)
            lowered = step.lower(*programs.arguments(case.model, mesh.size))
        else:
            lower, options = BASELINES[program]
            lowered = lower(case.model, mesh)
            if which == "predicted":
                options = {**options, **predicted_latencies(lowered, mesh)}
        compiled = lowered.compile(compiler_options=options or None)
        row = played(compiled.as_text() or "", target, mesh)
        row["temp"] = compiled.memory_analysis().temp_size_in_bytes
        found[which] = row
    return found


def cells(name: str, program: str, row: dict[str, Any]) -> tuple[str, ...]:
    both = [row[which] for which in LATENCIES]
    steps = [x["step_s"] for x in both]
    return (
        *(program, name),
        *(f"{1e3 * s:,.1f} ms" for s in steps),
        f"{steps[1] / steps[0]:.3f}",
        *(f"{x['exposed_s'] / x['step_s']:.1%}" for x in both),
        *(f"{x['temp'] / 2**30:.2f} GiB" for x in both),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--rerun", action="store_true")
    arguments = parser.parse_args()
    path, lines = RESULTS / "latencies.json", []
    rows = json.loads(path.read_text()) if path.exists() else {}
    for name in arguments.case or DEFAULT:
        for program in PROGRAMS:
            key = f"{name} {program}"
            if arguments.rerun or key not in rows:
                print(key, file=sys.stderr, flush=True)
                rows[key] = measured(name, program)
                path.write_text(json.dumps(rows, indent=1) + "\n")
            lines.append(cells(name, program, rows[key]))
    print(markdown(COLUMNS, lines))


if __name__ == "__main__":
    main()
