"""What options of XLA that are not set by default do to a case of `criteria.py`,
compiled for v5ps and H100s that are not there (extra `aot`). Rows are kept in
`results/`; a new one takes 10 seconds for H100s, 1 to 5 minutes for v5ps.

    python benchmarks/xla_options.py
    python benchmarks/xla_options.py --chip v5p --case llama-7b-64 --rerun
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import criteria_programs as programs
from criteria_cases import CASES
from criteria_table import markdown

from shardfn.analysis import targets

RESULTS = Path(__file__).parent / "results"
DEFAULT = {
    "h100": ("gpt-175b-128", "gpt-175b-512"),
    "v5p": ("gpt-1.3b-8",),
}
TPU: dict[str, dict[str, Any]] = {
    "as it is": {},
    "gathers pipelined over ICI": {
        "xla_tpu_enable_ici_ag_pipelining": "true",
        "xla_should_allow_loop_variant_parameter_in_chain": "ENABLED",
        "xla_should_add_loop_invariant_op_in_chain": "ENABLED",
    },
    "aggregator, layer scheduler": {
        "xla_tpu_enable_sparse_core_collective_aggregator": "true",
        "xla_tpu_enable_latency_hiding_layer_scheduler": "true",
    },
    "96 MiB of scoped VMEM": {"xla_tpu_scoped_vmem_limit_kib": "98304"},
}
"""By name. They are those that github.com/openxla/xla, docs/flags_guidance.md, and
AI-Hypercomputer/maxtext, benchmarks/xla_flags_library.py, name for gathers and
reduce-scatters."""
GPU: dict[str, dict[str, Any]] = {
    "as it is": {},
    "loops unrolled by two": {
        "xla_gpu_enable_while_loop_unrolling": "WHILE_LOOP_UNROLLING_DOUBLE_BUFFER"
    },
    "copies by regions": {"xla_gpu_copy_insertion_use_region_analysis": True},
    "sums not delayed": {"xla_gpu_enable_pipelined_reduce_scatter": False},
    "one latency per operation": {
        "xla_gpu_enable_analytical_sol_latency_estimator": False
    },
}
"""By name: what could save the copies that XLA makes to delay sums, and how it would
schedule without its figures for the network."""
FLAGS = {
    "h100": {
        "50 GB/s of network": "--xla_gpu_analytical_latency_estimator_options="
        "nic_speed_gbps=50"
    },
    "v5p": {},
}
"""By name: what can be said in XLA_FLAGS only, before JAX starts. XLA takes 25 GB/s of
network for each H100 (openxla/xla, xla/service/gpu/model/sol_gpu_cost_model.cc)."""
OPTIONS = {"h100": GPU, "v5p": TPU}
COLUMNS = (
    *("case", "chip", "options", "step", "of it", "exposed"),
    *("peak temporary", "memory read and written"),
)


def measured(name: str, chip: str, options: dict[str, Any]) -> dict[str, Any]:
    case = CASES[name]
    target = case.target(chip)
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
        "traffic": report.memory_seconds,
    }


def measured_with(name: str, chip: str, flags: str) -> dict[str, Any]:
    """The same with flags of XLA's, in a process of its own."""
    words = [sys.executable, __file__, "--one", name, chip]
    env = os.environ | {"XLA_FLAGS": flags}
    done = subprocess.run(words, capture_output=True, text=True, env=env)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1][:200]}
    return json.loads(done.stdout.splitlines()[-1])


def cells(name: str, chip: str, rows: dict[str, Any]) -> list[tuple[str, ...]]:
    least = rows["as it is"]["step"]
    found: list[tuple[str, ...]] = []
    for title, row in rows.items():
        if "error" in row:
            found.append((name, chip, title, row["error"], *[""] * 4))
            continue
        step, exposed, temporary = row["step"], row["exposed"], row["temporary"]
        traffic = row.get("traffic")
        found.append(
            (
                *(name, chip, title, f"{1e3 * step:,.1f} ms", f"{step / least:.3f}"),
                *(f"{exposed / step:.1%}", f"{temporary / 2**30:.2f} GiB"),
                "" if traffic is None else f"{1e3 * traffic:,.1f} ms",
            )
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chip", choices=OPTIONS, action="append")
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--rerun", action="store_true")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measured(*given.one, {})))
        return
    table: list[tuple[str, ...]] = []
    for chip in given.chip or OPTIONS:
        for name in given.case or DEFAULT[chip]:
            path = RESULTS / chip / f"options-{name}.json"
            rows = json.loads(path.read_text()) if path.exists() else {}
            for title in (*OPTIONS[chip], *FLAGS[chip]):
                if given.rerun or title not in rows:
                    if title in FLAGS[chip]:
                        rows[title] = measured_with(name, chip, FLAGS[chip][title])
                    else:
                        rows[title] = measured(name, chip, OPTIONS[chip][title])
                    path.write_text(json.dumps(rows, indent=1) + "\n")
                    print(name, title, rows[title], file=sys.stderr, flush=True)
            table += cells(name, chip, rows)
    print(markdown(COLUMNS, table))


if __name__ == "__main__":
    main()
