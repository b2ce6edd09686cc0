"""What moving leaves together (`bucket_bytes`) is worth: cases of `criteria.py` with
several sizes of buckets, compiled for H100s that are not there. Needs the extra `aot`;
a row takes 10 to 60 s.

    python benchmarks/buckets.py
    python benchmarks/buckets.py --case llama-7b-64
"""

import argparse
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

import criteria_programs as programs
from criteria_cases import CASES
from stationary_table import table

from shardfn.analysis import targets

DEFAULT = ("llama-7b-64",)
SIZES = (None, 1, 32, 128, 512)
"""In MiB; None for no buckets, as it is without the option."""
COLUMNS = ("case", "bucket_bytes", "transfers", "step", "of it", "exposed", "temporary")


def rows(name: str) -> list[list[str]]:
    case = CASES[name]
    target = case.target("h100")
    mesh = targets.mesh(target)
    found: list[list[str]] = []
    least = 0.0
    for size in SIZES:
        options = {} if size is None else {"bucket_bytes": size << 20}
        step = programs.sharded(case.model, mesh, **options)
        report = step.on(target, *programs.arguments(case.model, mesh.size))
        seconds = report.step_seconds
        least = least or seconds
        transfers = sum(line.times or 1 for line in report.plan.collectives)
        found.append(
            [
                *(name, "none" if size is None else f"{size} MiB", f"{transfers:,}"),
                *(f"{1e3 * seconds:,.1f} ms", f"{seconds / least:.3f}"),
                f"{report.exposed_seconds / seconds:.1%}",
                f"{report.memory.temporary / 2**30:.2f} GiB",
            ]
        )
        print(*found[-1], file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, action="append")
    given = parser.parse_args()
    print(table(COLUMNS, (row for name in given.case or DEFAULT for row in rows(name))))


if __name__ == "__main__":
    main()
