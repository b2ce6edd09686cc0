"""Compiles the programs of well-known issues for machines that are not there, `jit`
beside shardfn on the same step, and prints what the compiled programs send and take.

    python examples/famous_issues/run.py                   # all, in about a minute
    python examples/famous_issues/run.py gathers_kept      # one

The figures are read off the compiled programs, so that they are the same every time.
Needs the extra `aot`.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

if __name__ == "__main__":  # before JAX is imported
    os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import jax
from beside import figures

from shardfn.analysis import targets

ISSUES = {
    "reshard": "jax#21562",
    "gathers_kept": "jax#25010",
    "unrolled_layers": "jax#20763",
    "large_table": "openpi#112",
    "five_devices": "levanter#429",
    "summed_in_a_loop": "xla#49143",
}
HEADER = (
    *("issue", "target", "program", "collectives", "sent MiB", "largest MiB"),
    *("state and batch MiB", "temporary MiB", "remark"),
)


class Row(NamedTuple):
    """A program, or why there is none; bytes are of one device."""

    issue: str
    target: str
    program: str
    remark: str
    collectives: int = 0
    sent: float = 0
    largest: int = 0
    arguments: int = 0
    temporary: int = 0

    def cells(self) -> tuple[str, ...]:
        first = self.issue, self.target, self.program
        if not self.arguments:
            return (*first, *[""] * 5, self.remark)
        sizes = self.sent, self.largest, self.arguments, self.temporary
        found = (f"{x / 2**20:.1f}" for x in sizes)
        return (*first, str(self.collectives), *found, self.remark)


def measure(name: str, program: str, lower: Callable[[], jax.stages.Lowered]) -> Row:
    issue: ModuleType = importlib.import_module(name)
    of = ISSUES[name], issue.TARGET.replace(":1x1x", ":"), program
    try:
        compiled = lower().compile()
    except ValueError as error:  # by jit, of a split that does not come out even
        return Row(*of, f"refused: {type(error).__name__}")
    found = figures(compiled)
    return Row(
        *of,
        issue.remark(compiled.as_text()) if hasattr(issue, "remark") else "",
        round(found.collectives),
        found.wire,
        found.largest,
        compiled.memory_analysis().argument_size_in_bytes,
        found.temporary,
    )


def rows(name: str, small: bool = False) -> list[Row]:
    """The programs of one issue; at sizes for tests if `small`."""
    issue: ModuleType = importlib.import_module(name)
    mesh = targets.mesh(issue.TARGET, (*issue.AXES,), (*issue.AXES.values(),))
    programs = issue.programs(mesh, issue.SMALL if small else issue.SIZE)
    return [measure(name, *found) for found in programs.items()]


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(ISSUES))
    names = parser.parse_args(argv).names or list(ISSUES)
    unknown = [name for name in names if name not in ISSUES]
    if unknown:
        parser.error(f"no issue is called {unknown[0]!r}; there are {[*ISSUES]}")
    print("| " + " | ".join(HEADER) + " |")
    print("|---" * len(HEADER) + "|")
    for name in names:
        for row in rows(name):
            print("| " + " | ".join(row.cells()) + " |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
