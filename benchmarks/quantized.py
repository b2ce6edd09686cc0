"""Bytes on the wire of whole training steps with quantized gathers and sums, as planned
and as compilers of devices that are not there make them, beside the exact ones.

Predicted times are of the same simulator for all; nothing is run.

    python benchmarks/quantized.py                          # 1.3B on 8 H100s
    python benchmarks/quantized.py --case llama-7b-64 --plan    # compiles nothing
    python benchmarks/quantized.py --chip v5p --asked both
"""

import argparse
import os
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import criteria_programs as programs
from criteria_cases import CASES as CRITERIA, CHIPS, LLAMA3_8B, Case

from shardfn.analysis import targets

CASES = CRITERIA | {"llama3-8b-64": Case("llama3-8b-64", LLAMA3_8B, 64)}

ASKED: dict[str, dict[str, Any]] = {
    "exact": {},
    "gathers int8": {"gather_dtype": "int8"},
    "gathers fp8": {"gather_dtype": "float8_e4m3fn"},
    "sums int8": {"reduce_dtype": "int8"},
    "both": {"gather_dtype": "int8", "reduce_dtype": "int8"},
}
"""Options of `fully_shard` that are compared, by the name of their row."""

HEADER = (
    "asked",
    "planned",
    "compiled",
    "as planned",
    "step",
    "transfers",
    "exposed",
    "memory",
    "temp GiB",
)


def measure(case: str, chip: str, asked: str, compiles: bool) -> tuple[str, ...]:
    """One row: what a step sends, in parameters' bytes, and what it is to take."""
    model, target = CASES[case].model, CASES[case].target(chip)
    mesh = targets.mesh(target)
    state, batch = programs.arguments(model, mesh.size)
    step = programs.sharded(model, mesh, **ASKED[asked])
    if not compiles:
        plan = step.plan(state, batch)
        return asked, f"{plan.wire_bytes / plan.parameter_bytes:.3f} M"
    report = step.on(target, state, batch)
    m, checked = report.plan.parameter_bytes, report.verification
    if not checked.ok:
        print(checked.problems())
    return (
        asked,
        f"{checked.planned_bytes / m:.3f} M",
        f"{checked.wire_bytes / m:.3f} M",
        "yes" if checked.ok else "no",
        f"{report.step_seconds * 1e3:.1f} ms",
        f"{report.transfer_seconds * 1e3:.1f} ms",
        f"{report.exposed_seconds * 1e3:.1f} ms",
        f"{report.memory_seconds * 1e3:.1f} ms",
        f"{report.memory.temporary / 2**30:.2f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, default="gpt-1.3b-8")
    parser.add_argument("--chip", choices=CHIPS, default="h100")
    parser.add_argument("--asked", choices=ASKED, action="append")
    parser.add_argument("--plan", action="store_true", help="compile nothing")
    arguments = parser.parse_args()
    print(f"{arguments.case} on {arguments.chip}s")
    print("  ".join(cell.rjust(12) for cell in HEADER))
    for asked in arguments.asked or ASKED:
        row = measure(arguments.case, arguments.chip, asked, not arguments.plan)
        print("  ".join(cell.rjust(12) for cell in row), flush=True)


if __name__ == "__main__":
    main()
