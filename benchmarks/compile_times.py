"""How long lowering and compiling takes, beside the program constrained by hand.

The kept rows of `criteria.py` were compiled once each, and one program differs by up to
15% from run to run. Here both programs of a case are lowered and compiled in turn, each
in a process of its own, in an order that alternates, and what counts is the median of
the ratios of neighbours. Times are of all cores, and of the clock. The device is one
that is not there. Needs the extra `aot`; a minute or two for each case and round.

    python benchmarks/compile_times.py
    python benchmarks/compile_times.py --case llama-7b-64 --rounds 5
    python benchmarks/compile_times.py --case t5-11b-512 --program "shardfn lean"
"""

import argparse
import statistics
import sys
from typing import Any

from criteria import run
from criteria_cases import CASES, CHIPS
from criteria_measure import ASKED
from criteria_table import markdown

OURS, BASELINE = "shardfn", "constrained"
SCANNED = [
    name for name, case in CASES.items() if 5 in case.criteria and case.model.scan
]
HEADER = (
    *("case", "program", "rounds"),
    *("lower, constrained", "lower, ours", "all, constrained", "all, ours"),
    *("ratio of medians", "ratio of least", "median ratio of neighbours", "from, to"),
    *("by the clock", "instructions, constrained", "instructions, ours"),
)
Row = dict[str, Any]


def rounds_of(case: str, chip: str, program: str, count: int, limit: int) -> list[Row]:
    """Rows of the two programs, by round.

    Args:
      case: of `criteria.py`.
      chip: what it is compiled for.
      program: this library's, of `criteria.py`.
      count: rounds.
      limit: seconds for a program.
    """
    found = []
    for at in range(count):
        names = (BASELINE, program) if at % 2 else (program, BASELINE)
        rows = {name: run([case, chip, name], limit) for name in names}
        errors = [row["error"] for row in rows.values() if "error" in row]
        if errors:
            sys.exit(f"{case}: {errors[0]}")
        took = ", ".join(f"{n} {r['seconds']:.1f} s" for n, r in rows.items())
        print(f"[{at + 1}/{count}] {case} {chip}: {took}", file=sys.stderr, flush=True)
        found.append({"ours": rows[program], "theirs": rows[BASELINE]})
    return found


def line(case: str, program: str, rounds: list[Row]) -> tuple[str, ...]:
    """A line of the table."""

    def every(whose: str, figure: str) -> list[float]:
        return [row[whose][figure] for row in rounds]

    def median(whose: str, figure: str) -> float:
        return statistics.median(every(whose, figure))

    ours, theirs = every("ours", "seconds"), every("theirs", "seconds")
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    clock = [
        a / b
        for a, b in zip(every("ours", "wall_s"), every("theirs", "wall_s"), strict=True)
    ]
    return (
        *(case, program, str(len(rounds))),
        f"{median('theirs', 'lower_s'):.2f} s",
        f"{median('ours', 'lower_s'):.2f} s",
        f"{statistics.median(theirs):.1f} s",
        f"{statistics.median(ours):.1f} s",
        f"{statistics.median(ours) / statistics.median(theirs):.2f}",
        f"{min(ours) / min(theirs):.2f}",
        f"{statistics.median(ratios):.2f}",
        f"{min(ratios):.2f}, {max(ratios):.2f}",
        f"{statistics.median(clock):.2f}",
        *(f"{rounds[0][whose]['instructions']:,}" for whose in ("theirs", "ours")),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--case", choices=SCANNED, action="append")
    parser.add_argument("--chip", choices=CHIPS, default="h100")
    parser.add_argument("--program", choices=(OURS, *ASKED), default=OURS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=int, default=600, help="seconds for a program")
    given = parser.parse_args()
    lines = []
    for case in given.case or SCANNED:
        rounds = rounds_of(case, given.chip, given.program, given.rounds, given.limit)
        lines.append(line(case, given.program, rounds))
    print(markdown(HEADER, lines))


if __name__ == "__main__":
    main()
