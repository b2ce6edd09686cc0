"""What a plan says that a step takes of each device, beside what compilers say, for the
programs of `criteria.py`, those of `host_memory.py` with their moments on the host, and
the other models of `scaling.py` on H100s. The compilers' figures are the rows in
`results/`; plans are made anew, in two minutes.
Needs the extra `aot`, whose compilers make the meshes of devices that are not there.

    python benchmarks/estimated_memory.py
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import criteria_programs as programs
import scaling
from criteria_cases import CASES, CHIPS, Model
from host_memory import CASES as WITH_HOST
from stationary_table import table

import shardfn
from shardfn.analysis import targets

RESULTS = Path(__file__).parent / "results"
NO_BOUND = "1000000GiB"
OTHERS = ("dhen", "bert-large", "resnet-50")
COLUMNS = ("case", "target", "stored", "by the plan", "by the compiler", "of it")


def estimate(model: Model, target: str, offload: Any = NO_BOUND) -> tuple[int, int]:
    """Bytes that a device stores of a step's state, and that the step takes."""
    mesh = targets.mesh(target)
    step = programs.sharded(model, mesh, offload=offload)
    return planned_by(step.plan(*programs.arguments(model, mesh.size)))


def estimate_of(name: str, target: str) -> tuple[int, int]:
    """The same, of a model of `scaling.py`."""
    case, mesh = scaling.CASES[name], targets.mesh(target)
    step, *arguments = case.make(mesh.size)
    options = {**case.options, "offload": NO_BOUND}
    return planned_by(shardfn.fully_shard(step, mesh, **options).plan(*arguments))


def compiled_of(name: str, target: str) -> int:
    """Bytes that the kept program of a model of `scaling.py` takes."""
    kept = json.loads((RESULTS / "scaling.json").read_text())
    return kept[f"{name} {target}"]["peak"]


def planned_by(plan: shardfn.Plan) -> tuple[int, int]:
    """The same, of a plan with a bound."""
    assert plan.offload is not None
    stored = sum(group.bytes for group in plan.offload.groups)
    return stored, plan.offload.without


def compiled(chip: str, name: str, program: str) -> dict[str, Any]:
    """The kept row of a program, empty if there is none."""
    path = RESULTS / chip / f"{name}.json"
    return json.loads(path.read_text()).get(program, {}) if path.exists() else {}


def rows() -> Iterator[tuple[str, str, int, int, int]]:
    """Case, target, bytes stored, taken by the plan, and by the compiler."""
    for chip in CHIPS:
        for name, case in CASES.items():
            row = compiled(chip, name, "shardfn")
            if "temp" in row:
                target = case.target(chip)
                stored, planned = estimate(case.model, target)
                yield name, target, stored, planned, stored + row["temp"]
    for name, case in WITH_HOST.items():
        row = compiled(case.chip, f"host-{name}", "moments")
        if "peak" in row and case.chip == "h100":  # libtpu's summaries are not peaks
            offload = {"opt/*": "host", "params/*": NO_BOUND}
            stored, planned = estimate(case.model, case.target, offload)
            yield f"{name}, moments", case.target, stored, planned, row["peak"]
    for name in OTHERS:
        for devices in scaling.CASES[name].devices:
            target = f"h100:{devices}"
            yield name, target, *estimate_of(name, target), compiled_of(name, target)


def main() -> None:
    cells = []
    for name, target, stored, planned, found in rows():
        print(name, target, file=sys.stderr)
        sizes = [f"{size / 2**30:,.2f} GiB" for size in (stored, planned, found)]
        cells.append([name, target, *sizes, f"{planned / found:.2f}"])
    print(table(COLUMNS, iter(cells)))


if __name__ == "__main__":
    main()
