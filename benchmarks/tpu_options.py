"""What options of XLA for TPUs that are not set by default do to a case of
`criteria.py`, compiled for v5ps that are not there (extra `aot`). Rows are kept in
`results/v5p/`; each takes 1 to 3 minutes.

    python benchmarks/tpu_options.py
    python benchmarks/tpu_options.py --case llama-7b-64 --rerun
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import criteria_programs as programs
from criteria_cases import CASES
from criteria_table import markdown

from shardfn.analysis import targets

RESULTS = Path(__file__).parent / "results" / "v5p"
DEFAULT = ("gpt-1.3b-8",)
AGGREGATOR = {"xla_tpu_enable_sparse_core_collective_aggregator": "true"}
LAYERS = AGGREGATOR | {"xla_tpu_enable_latency_hiding_layer_scheduler": "true"}
DEPENDENT = "xla_tpu_enable_layer_scheduler_for_dependent_collectives"
OPTIONS: dict[str, dict[str, str]] = {
    "as it is": {},
    "gathers pipelined over ICI": {
        "xla_tpu_enable_ici_ag_pipelining": "true",
        "xla_should_allow_loop_variant_parameter_in_chain": "ENABLED",
        "xla_should_add_loop_invariant_op_in_chain": "ENABLED",
    },
    "aggregator": AGGREGATOR,
    "aggregator, layer scheduler": LAYERS,
    "the same, for dependent collectives": LAYERS | {DEPENDENT: "true"},
    "one sparse core for gathers": {
        "xla_tpu_use_single_sparse_core_for_all_gather_offload": "true"
    },
    "150% of memory for the scheduler": {
        "xla_tpu_scheduler_percent_shared_memory_limit": "150"
    },
    "96 MiB of scoped VMEM": {"xla_tpu_scoped_vmem_limit_kib": "98304"},
    "scheduler run again 5 times": {"xla_latency_hiding_scheduler_rerun": "5"},
}
"""By name. They are those that github.com/openxla/xla, docs/flags_guidance.md, and
AI-Hypercomputer/maxtext, benchmarks/xla_flags_library.py, name for gathers and
reduce-scatters."""
COLUMNS = ("case", "options", "step", "of it", "exposed", "peak temporary")


def measured(name: str, options: dict[str, str]) -> dict[str, Any]:
    case = CASES[name]
    target = case.target("v5p")
    mesh = targets.mesh(target)
    step = programs.sharded(case.model, mesh, compiler_options=options)
    try:
        report = step.on(target, *programs.arguments(case.model, mesh.size))
    except Exception as error:
        return {"error": str(error).splitlines()[0][:200]}
    return {
        "step": report.step_seconds,
        "exposed": report.exposed_seconds,
        "temporary": report.memory.temporary,
    }


def cells(name: str, rows: dict[str, Any]) -> list[tuple[str, ...]]:
    least = rows["as it is"]["step"]
    found: list[tuple[str, ...]] = []
    for title, row in rows.items():
        if "error" in row:
            found.append((name, title, row["error"], "", "", ""))
            continue
        step, exposed, temporary = row["step"], row["exposed"], row["temporary"]
        found.append(
            (
                *(name, title, f"{1e3 * step:,.1f} ms", f"{step / least:.3f}"),
                *(f"{exposed / step:.1%}", f"{temporary / 2**30:.2f} GiB"),
            )
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--rerun", action="store_true")
    given = parser.parse_args()
    table: list[tuple[str, ...]] = []
    for name in given.case or DEFAULT:
        path = RESULTS / f"options-{name}.json"
        rows = json.loads(path.read_text()) if path.exists() else {}
        for title, options in OPTIONS.items():
            if given.rerun or title not in rows:
                rows[title] = measured(name, options)
                path.write_text(json.dumps(rows, indent=1) + "\n")
                print(name, title, rows[title], file=sys.stderr, flush=True)
        table += cells(name, rows)
    print(markdown(COLUMNS, table))


if __name__ == "__main__":
    main()
