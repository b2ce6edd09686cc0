"""What the search over the order of moves is worth: cases of `criteria.py`, planned as
they are and with no move that waits, compiled for H100s that are not there. Memory is
what one device takes beside its arguments, by the compiler. Needs the extra `aot`; a
row takes 20 to 200 s.

    python benchmarks/order.py
    python benchmarks/order.py --case gpt-1.3b-8
"""

import argparse
import os
import sys
from unittest import mock

os.environ["JAX_PLATFORMS"] = "cpu"

import criteria_programs as programs
from criteria_cases import CASES
from stationary_table import table

from shardfn._schedule import pipeline
from shardfn.analysis import Report, targets

DEFAULT = (
    *("gpt-1.3b-8", "gpt-1.3b-8-unrolled", "llama-7b-64"),
    *("t5-11b-8", "gpt-175b-128", "gpt-175b-512"),
)
COLUMNS = (
    "case",
    "searched",
    "nothing waits",
    "of it",
    "step",
    "nothing waits",
    "of it",
)


def compiled(name: str) -> Report:
    case = CASES[name]
    target = case.target("h100")
    mesh = targets.mesh(target)
    step = programs.sharded(case.model, mesh)
    return step.on(target, *programs.arguments(case.model, mesh.size))


def row(name: str) -> list[str]:
    searched = compiled(name)
    with mock.patch.object(pipeline, "search_order", lambda program, body, axes: body):
        free = compiled(name)
    memory = [report.memory.temporary for report in (searched, free)]
    seconds = [report.step_seconds for report in (searched, free)]
    return [
        name,
        *(f"{size / 2**30:.2f} GiB" for size in memory),
        f"{memory[0] / memory[1]:.2f}",
        *(f"{1e3 * second:,.1f} ms" for second in seconds),
        f"{seconds[0] / seconds[1]:.3f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, action="append")
    given = parser.parse_args()
    rows = []
    for name in given.case or DEFAULT:
        rows.append(row(name))
        print(*rows[-1], file=sys.stderr, flush=True)
    print(table(COLUMNS, iter(rows)))


if __name__ == "__main__":
    main()
