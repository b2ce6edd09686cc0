"""Steps in which activations are smaller than weights: what each device sends, in how
many collectives, and the predicted time, with all leaves gathered, as the plan chooses,
and with the best dimensions stored; beside `jit` on the same step with the state stored
alike, and of a decoded token Megatron by hand. Compiled for devices that are not there,
and played on the same player. Rows are kept in `results/`; needs the extra `aot`.

    python benchmarks/stationary.py                          # the table
    python benchmarks/stationary.py --case decode-8 --chip h100 --rerun
    python benchmarks/stationary.py --case decode-8 --plan   # the plans, no compiler
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import beside
import jax
from jax.sharding import Mesh
from stationary_cases import CASES, Case
from stationary_llama import MEGATRON, megatron
from stationary_table import cases_table, decoding_table, mib, rows_table

import shardfn
from shardfn.analysis import targets

RESULTS = Path(__file__).parent / "results"
TARGETS = {
    "h100": {8: "h100:8", 64: "h100:64"},
    "v5p": {8: "tpu:v5p:2x2x2", 64: "tpu:v5p:4x4x4"},
}
OURS: dict[str, dict[str, Any]] = {
    "gathered": {"stationary": False},
    "chosen": {},
    "by use": {"use": True},
    "asked": {"columns": True},
}
"""All leaves gathered; the default; the default with leaves stored on the dimensions
that `best_dimensions` finds; and on those that are best by hand."""
JIT = {"jit": {}, "jit asked": {"columns": True}}
Row = dict[str, Any]


def programs_of(case: Case) -> list[str]:
    names = [name + spec for spec in case.batch_specs for name in (*OURS, *JIT)]
    return names + (list(MEGATRON) if case.llama else [])


def sharded(case: Case, program: str, mesh: Mesh) -> shardfn.ShardedStep[..., Any]:
    """The step with the options that a program's name stands for."""
    name, spec = split_name(case, program)
    options = dict((OURS | JIT)[name])
    asked, use = (options.pop(key, False) for key in ("columns", "use"))
    specs: dict[str, Any] = {"batch_spec": case.batch_specs[spec]}
    if use:
        by_shape = shardfn.fully_shard(case.step, mesh, **specs)
        dims = by_shape.best_dimensions(*case.args)
    else:
        dims = case.columns if asked else None
    return shardfn.fully_shard(case.step, mesh, shard=dims, **specs, **options)


def split_name(case: Case, program: str) -> tuple[str, str]:
    spec = next(
        s for s in sorted(case.batch_specs, reverse=True) if program.endswith(s)
    )
    return program.removesuffix(spec), spec


def measure(name: str, chip: str, program: str) -> Row:
    """Compiles one program for devices that are not there; a row of JSON."""
    case = CASES[name]()
    target = TARGETS[chip][case.devices]
    mesh = targets.mesh(target)
    row: Row = {"jax": jax.__version__}
    if program in MEGATRON and case.llama:
        compiled = megatron(case.llama, mesh, program).compile()
        return row | asdict(beside.figures(compiled, mesh, target))
    step = sharded(case, program, mesh)
    variant, spec = split_name(case, program)
    if variant in JIT:
        specs = case.batch_specs[spec]
        lowered = beside.jitted(case.step, step, case.args, specs, case.returned)
        return row | asdict(beside.figures(lowered.compile(), mesh, target))
    compiled = step.lower(*case.args).compile()
    row |= asdict(beside.figures(compiled, mesh, target))
    plan = step.plan(*case.args)
    checked = plan.verify(compiled.as_text() or "")
    row |= {"planned": plan.wire_bytes, "as_planned": checked.ok}
    return row if checked.ok else row | {"problems": checked.problems()}


def path_of(name: str, chip: str) -> Path:
    return RESULTS / chip / f"stationary-{name}.json"


def read(name: str, chip: str) -> dict[str, Row]:
    path = path_of(name, chip)
    return json.loads(path.read_text()) if path.exists() else {}


def keep(name: str, chip: str, program: str, row: Row) -> None:
    rows = read(name, chip) | {program: row}
    ordered = {p: rows[p] for p in programs_of(CASES[name]()) if p in rows}
    path_of(name, chip).write_text(json.dumps(ordered, indent=1) + "\n")


def run(name: str, chip: str, program: str) -> Row:
    """Measures one row in a process of its own."""
    command = [sys.executable, __file__, "--one", name, chip, program]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1][:300]}
    return json.loads(done.stdout.splitlines()[-1])


def print_plans(names: list[str]) -> None:
    jax.config.update("jax_num_cpu_devices", 64)
    for name in names:
        case = CASES[name]()
        mesh = jax.make_mesh((case.devices,), ("data",))
        for program in programs_of(case):
            if program not in MEGATRON and split_name(case, program)[0] in OURS:
                plan = sharded(case, program, mesh).plan(*case.args)
                print(f"{name}, {program}: the least is {mib(case.least)}\n{plan}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--chip", choices=TARGETS, action="append")
    parser.add_argument("--program", action="append")
    parser.add_argument("--rerun", action="store_true", help="measure kept rows again")
    parser.add_argument("--kept", action="store_true", help="measure nothing")
    parser.add_argument("--rows", action="store_true", help="every figure")
    parser.add_argument("--plan", action="store_true", help="print plans, no more")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(*args.one)))
        return
    names = args.case or list(CASES)
    if args.plan:
        print_plans(names)
        return
    cases = {name: CASES[name]() for name in names}
    for name, chip in itertools.product(names, args.chip or TARGETS):
        for program in args.program or programs_of(cases[name]):
            if args.rerun or not args.kept and program not in read(name, chip):
                start = time.perf_counter()
                keep(name, chip, program, run(name, chip, program))
                took = time.perf_counter() - start
                print(f"{name} {chip} {program}: {took:.0f} s", file=sys.stderr)
    pairs = itertools.product(names, args.chip or TARGETS)
    measured = {pair: rows for pair in pairs if (rows := read(*pair))}
    if args.rows:
        print(rows_table(measured))
        return
    print(cases_table(measured, cases))
    for (name, chip), rows in measured.items():
        if cases[name].llama:
            print(f"\n{name}, {chip}\n\n{decoding_table(rows, cases[name])}")


if __name__ == "__main__":
    main()
