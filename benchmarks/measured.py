"""Steps that run on the GPU of this machine, beside what is predicted of them.

On one GPU, the plain step under `jit` and through `fully_shard`. For more, the program
that one of many GPUs runs, at its true size, with stand-ins for the others
(`stand_ins.py`): its compute and its memory are measured, its transfers are not.
Each program runs in a process of its own. Rows are kept in `results/measured.json`.

    python benchmarks/measured.py            # the tables; measures what is missing
    python benchmarks/measured.py --case gpt-175b-128 --case llama-7b-64 --rerun
    python benchmarks/measured.py --kept     # measures nothing
    python benchmarks/measured.py --case tiny        # tries it out; no row is kept
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import measured_cases as cases
import measured_kernels
from criteria_table import markdown
from host_measured import gib, ms

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "measured.json"
AHEAD = 3
"""Programs that get ready while one is measured."""
STEPS = ("case", "program", "numbers", "measured", "predicted", "measured / predicted")
OF_OURS = ("of shardfn's, measured", "of shardfn's, predicted")
MEMORY = ("peak, measured", "peak, compiled")
OTHERS = "idle", "step, back to back", "compiled in"
BY_KIND = {"matmul": "matmuls", measured_kernels.SCORES: "scores", "rest": "rest"}
Row = dict[str, Any]


class Program:
    """A program of a case, in a process of its own."""

    def __init__(self, case: str, program: str, steps: int, folder: Path) -> None:
        self.out = folder / f"{case} {program}.json"
        spec = {
            "case": case,
            "program": program,
            "devices": cases.devices_of(case),
            "steps": steps,
            "out": str(self.out),
        }
        memory = {"PREALLOCATE": "false", "MEM_FRACTION": "0.95"}
        own = {f"XLA_PYTHON_CLIENT_{name}": value for name, value in memory.items()}
        self.log = self.out.with_suffix(".log")
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "measured_run.py"), json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            text=True,
            env=os.environ | own,
        )

    def row(self) -> Row:
        """Lets it compile and run."""
        self.process.communicate("go\n")
        if self.process.returncode:
            said = [line for line in self.log.read_text().splitlines() if line.strip()]
            return {"error": said[-1][:300] if said else "it said nothing"}
        return json.loads(self.out.read_text())


def measure(
    wanted: list[tuple[str, str]], steps: int
) -> Iterator[tuple[str, str, Row]]:
    """Rows of programs, with case and program, each as soon as it is there."""
    with tempfile.TemporaryDirectory() as folder:
        ahead: list[Program] = []
        for at, (case, program) in enumerate(wanted):
            for name in wanted[at + len(ahead) : at + AHEAD]:
                ahead.append(Program(*name, steps, Path(folder)))
            print(f"{case}: {program}", file=sys.stderr, flush=True)
            yield case, program, ahead.pop(0).row()


def seconds_of(row: Row) -> float:
    return statistics.median(row["seconds"])


def steps_table(rows: dict[str, dict[str, Row]]) -> str:
    """Steps, beside the prediction and beside this library's."""
    lines = []
    for case, programs in rows.items():
        ours = programs.get(cases.OURS, {})
        for name, row in programs.items():
            if "error" in row:
                lines.append((case, name, row["error"], *[""] * 7))
                continue
            found, said = seconds_of(row), row.get("predicted")
            cells = [case, name, "yes" if row["finite"] else "no", ms(found)]
            cells += [ms(said), f"{found / said:.2f}"] if said else ["", ""]
            if "seconds" in ours and said:
                times = found / seconds_of(ours), said / ours["predicted"]
                cells += [f"{time:.3f}" for time in times]
            else:
                cells += ["", ""]
            lines.append(
                (*cells, gib(row["peak"]), gib(row["arguments"] + row["temp"]))
            )
    return markdown((*STEPS, *OF_OURS, *MEMORY), lines)


def kinds_table(rows: dict[str, dict[str, Row]]) -> str:
    """One traced step by kind of kernel, measured over predicted; what a step takes if
    several are started one behind the other; what compiling took."""
    head = ["case", "program"]
    for name in BY_KIND.values():
        head += [f"{name}, measured", "/ predicted"]
    lines = []
    for case, programs in rows.items():
        for name, row in programs.items():
            if "measured_by" not in row:
                continue
            cells = [case, name]
            for kind in BY_KIND:
                found, said = row["measured_by"][kind], row["predicted_by"].get(kind, 0)
                cells += [ms(found), f"{found / said:.2f}" if said else ""]
            idle, together = row["measured_by"]["idle"], row["together"]
            compiled = f"{row['compile_s']:.1f} s" if "compile_s" in row else ""
            cells += [ms(idle), ms(together), compiled]
            lines.append(tuple(cells))
    return markdown((*head, *OTHERS), lines)


def losses(rows: dict[str, dict[str, Row]]) -> str:
    """The losses after all steps, where they are of numbers of training."""
    lines = []
    for case, programs in rows.items():
        found = {n: r["loss"] for n, r in programs.items() if r.get("loss") is not None}
        if cases.devices_of(case) == 1 and found:
            each = ", ".join(f"{loss:.6f} ({name})" for name, loss in found.items())
            lines.append(f"Losses of {case}: {each}.")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    known = (*cases.NAMES, *cases.TINY)
    parser.add_argument("--case", action="append", choices=known)
    parser.add_argument("--program", action="append", help="default: every one")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rerun", action="store_true")
    parser.add_argument("--kept", action="store_true", help="measures nothing")
    given = parser.parse_args()
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    wanted = [
        (case, program)
        for case in given.case or cases.NAMES
        for program in cases.programs_of(case)
        if program in (given.program or [program])
        and (given.rerun or program not in kept.get(case, {}))
    ]
    for case, program, row in measure([] if given.kept else wanted, given.steps):
        kept.setdefault(case, {})[program] = row
        own = {name: kept[name] for name in cases.NAMES if name in kept}
        RESULTS.write_text(json.dumps(own, indent=1) + "\n")
    shown = {name: kept[name] for name in given.case or cases.NAMES if name in kept}
    kinds = {
        (r["kind"], r["jax"]) for p in shown.values() for r in p.values() if "jax" in r
    }
    print("; ".join(f"one {kind}, JAX {version}" for kind, version in sorted(kinds)))
    print(f"\n{steps_table(shown)}\n\n{kinds_table(shown)}\n\n{losses(shown)}")


if __name__ == "__main__":
    main()
