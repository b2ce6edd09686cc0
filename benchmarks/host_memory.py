"""Training steps with leaves of the state in the memory of the host: what each device
holds with and without, how much of what left for the host is free there, what the
host's link takes; and the largest GPT that 8 devices train. Compiled for devices that
are not there, and played at the rates of data sheets. Rows are kept in `results/`;
needs the extra `aot`.

    python benchmarks/host_memory.py                   # the tables; measures what lacks
    python benchmarks/host_memory.py --case gpt-1.3b-8-h100 --rerun
    python benchmarks/host_memory.py --largest h100    # bisection, resumed where it was
    python benchmarks/host_memory.py --kept            # the tables, from kept rows
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import criteria_programs as programs
import jax
from criteria_cases import GPT_1B, Model
from host_measured import PROGRAMS
from stationary_table import table

import shardfn
from shardfn.analysis import targets

RESULTS = Path(__file__).parent / "results"
LLAMA_8B = Model("llama", 32, 4096, 32, 128, 14336, 32000, 4096, rows=1)
WIDE = Model("gpt", 1, 8192, 64, 128, 32768, 50304, 2048, rows=1)
NARROW = Model("gpt", 1, 4096, 32, 128, 16384, 50304, 1024, rows=1)
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A model on a target."""

    model: Model
    target: str

    @property
    def chip(self) -> str:
        return chip_of(self.target)


CASES = {
    "gpt-1.3b-8-h100": Case(GPT_1B, "h100:8"),
    "llama-8b-8-h100": Case(LLAMA_8B, "h100:8"),
    "llama-8b-64-h100": Case(LLAMA_8B, "h100:64"),
    "gpt-1.3b-8-v5e": Case(GPT_1B, "tpu:v5e:2x4"),
    "gpt-1.3b-8-v5p": Case(GPT_1B, "tpu:v5p:2x2x2"),
}
LARGEST = {"h100": Case(WIDE, "h100:8"), "v5e": Case(NARROW, "tpu:v5e:2x4")}
"""Models whose number of layers is searched for."""


def chip_of(target: str) -> str:
    return target.removeprefix("tpu:").partition(":")[0]


def report_of(model: Model, target: str, program: str) -> shardfn.analysis.Report:
    """What a step takes on a target."""
    mesh = targets.mesh(target)
    step = programs.sharded(model, mesh, **PROGRAMS[program])
    return step.on(target, *programs.arguments(model, mesh.size))


def measure(model: Model, target: str, program: str) -> Row:
    """Compiles one program for devices that are not there; a row of JSON."""
    row: Row = {"jax": jax.__version__, "parameters": count(model)}
    try:
        report = report_of(model, target, program)
    except shardfn.ShardingError as error:
        if "does not fit" not in str(error):
            raise
        return row | {"fits": False}
    memory = report.memory
    row |= {
        "fits": report.fits,
        "peak": memory.peak,
        "temporary": memory.temporary,
        "host": report.host_bytes,
        "host_peak": memory.host_arguments + memory.host_temporary,
        "seconds": report.step_seconds,
        "host_seconds": report.host_seconds,
        "host_exposed": report.host_exposed_seconds,
        "as_planned": report.verification.ok,
    }
    return (
        row if row["as_planned"] else row | {"problems": report.verification.problems()}
    )


def count(model: Model) -> int:
    state, _ = programs.arguments(model, 1)
    return sum(x.size for x in jax.tree.leaves(state["params"]))


def run(model: Model, target: str, program: str) -> Row:
    """Measures one row in a process of its own."""
    words = [json.dumps(asdict(model)), target, program]
    command = [sys.executable, __file__, "--one", *words]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    took = time.perf_counter() - start
    print(f"{target} {program}, {model.layers} layers: {took:.0f} s", file=sys.stderr)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1][:300]}
    return json.loads(done.stdout.splitlines()[-1])


def read(chip: str, name: str) -> dict[str, Any]:
    path = RESULTS / chip / f"host-{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def keep(chip: str, name: str, rows: Mapping[str, Any]) -> None:
    path = RESULTS / chip / f"host-{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, indent=1) + "\n")


def measure_case(name: str, rerun: bool) -> None:
    case = CASES[name]
    for program in PROGRAMS:
        if rerun or program not in read(case.chip, name):
            row = run(case.model, case.target, program)
            rows = read(case.chip, name) | {program: row}
            keep(case.chip, name, {p: rows[p] for p in PROGRAMS if p in rows})


# The largest model


def search(chip: str, program: str, start: int) -> None:
    """Finds the most layers that fit: between one that fits and one that does not, next
    to each other. Memory grows evenly with layers, so it tries where a line says. What
    was tried before is not compiled anew."""
    case = LARGEST[chip]

    def tried() -> dict[int, Row]:
        rows = read(chip, "largest").get(program, {})
        return {int(n): row for n, row in rows.items() if "error" not in row}

    memory = targets.target(case.target).memory
    layers: int | None = start
    if str(start) in read(chip, "largest").get(program, {}):
        layers = next_layers(tried(), memory)
    while layers is not None:
        row = run(replace(case.model, layers=layers), case.target, program)
        rows = read(chip, "largest")
        of_program = rows.get(program, {}) | {str(layers): row}
        keep(chip, "largest", rows | {program: of_program})
        if "error" in row:
            return
        layers = next_layers(tried(), memory)


def next_layers(tried: Mapping[int, Row], memory: int) -> int | None:
    """How many layers to try; None where the most that fit are known."""
    fit = [n for n, row in tried.items() if row["fits"]]
    most = max(fit, default=0)
    least = min((n for n, row in tried.items() if not row["fits"]), default=None)
    if least is not None and least - most <= 1:
        return None
    peaks = sorted((n, row["peak"]) for n, row in tried.items() if "peak" in row)
    if len(peaks) < 2:
        guess = 2 * most if least is None else (most + least) // 2
    else:
        (a, low), (b, high) = peaks[-2:]
        if most in (a, b) and least in (a, b):
            guess = a + int((memory - low) * (b - a) / (high - low))
        else:
            guess = b + int((memory - high) * (b - a) / (high - low))
    guess = max(guess, most + 1)
    return guess if least is None else min(guess, least - 1)


def largest(chip: str, program: str) -> tuple[int, Row] | None:
    """The most layers that fit, and their row; None where they are not known yet."""
    rows = {int(n): r for n, r in read(chip, "largest").get(program, {}).items()}
    found = max((n for n, row in rows.items() if row.get("fits")), default=None)
    if found is None or found + 1 not in rows:
        return None
    return found, rows[found]


# Tables


def gib(size: float) -> str:
    return f"{size / 2**30:,.2f} GiB"


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms"


COLUMNS = (
    *("model", "target", "on the host", "device peak", "offloaded", "of it freed"),
    *("host peak", "predicted step", "host link each way", "waits for it"),
)
OF_LARGEST = (
    *("target", "on the host", "layers", "parameters", "times", "device peak"),
    "predicted step",
)


def cases_table(names: list[str]) -> str:
    """Peaks with and without leaves on the host."""

    def lines() -> Iterator[list[str]]:
        for name in names:
            case = CASES[name]
            rows = read(case.chip, name)
            for program, row in rows.items():
                head = [f"{case.model.family} {size_of(row)}", case.target, program]
                if "peak" not in row:
                    yield [*head, row.get("error", "does not fit"), *[""] * 6]
                    continue
                freed = ""
                if row["host"] and "peak" in rows["device"]:
                    fallen = rows["device"]["peak"] - row["peak"]
                    freed = f"{fallen / row['host']:.0%}"
                mark = "" if row["as_planned"] else " (*)"
                yield [
                    *head,
                    gib(row["peak"]) + mark,
                    gib(row["host"]),
                    freed,
                    gib(row["host_peak"]),
                    ms(row["seconds"]),
                    ms(row["host_seconds"]),
                    ms(row["host_exposed"]),
                ]

    return table(COLUMNS, lines())


def size_of(row: Row) -> str:
    return f"{row['parameters'] / 1e9:.1f}B"


def largest_table() -> str:
    """The largest model that 8 devices train."""

    def lines() -> Iterator[list[str]]:
        for chip, case in LARGEST.items():
            base = largest(chip, "device")
            for program in PROGRAMS:
                found = largest(chip, program)
                if found is None or base is None:
                    continue
                layers, row = found
                yield [
                    case.target,
                    program,
                    str(layers),
                    size_of(row),
                    f"{row['parameters'] / base[1]['parameters']:.2f}",
                    gib(row["peak"]),
                    ms(row["seconds"]),
                ]

    return table(OF_LARGEST, lines())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--largest", choices=LARGEST, action="append")
    parser.add_argument("--program", choices=PROGRAMS, action="append")
    parser.add_argument("--layers", type=int, default=4, help="where a search begins")
    parser.add_argument("--rerun", action="store_true", help="measure kept rows again")
    parser.add_argument("--kept", action="store_true", help="measure nothing")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        model, target, program = args.one
        print(json.dumps(measure(Model(**json.loads(model)), target, program)))
        return
    names = args.case or ([] if args.largest else list(CASES))
    for name in [] if args.kept else names:
        measure_case(name, args.rerun)
    for chip in [] if args.kept else args.largest or ([] if args.case else LARGEST):
        for program in args.program or PROGRAMS:
            if args.rerun or largest(chip, program) is None:
                search(chip, program, args.layers)
    print(cases_table(names or list(CASES)))
    print(f"\n{largest_table()}")


if __name__ == "__main__":
    main()
