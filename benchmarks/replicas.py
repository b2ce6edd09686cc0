"""What replicas save between hosts: the state split within groups of devices, and the
same in each group (`axis=("replica", "data")`), beside the state split over all devices
and beside the same made with constraints by hand. Models of `criteria.py`, compiled for
H100s that are not there (extra `aot`), 30 to 120 s a row. Rows are kept in
`results/replicas.json`, those over all devices by `criteria.py`.

    python benchmarks/replicas.py
    python benchmarks/replicas.py --kept --jax 0.12
"""

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["JAX_PLATFORMS"] = "cpu"

import criteria_programs as programs
import jax
from criteria import read
from criteria_cases import CASES, Case
from criteria_measure import PLATFORMS, played
from criteria_models import Hand
from criteria_table import markdown
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from shardfn.analysis import targets
from shardfn.analysis._heap_size import compiled_with_heap

KEPT = Path(__file__).parent / "results" / "replicas.json"
GROUPS = {"llama-7b-64": (8,), "t5-11b-512": (8, 64)}
"""Devices of a group, by case: those of a host, or of several."""

AXES = ("replica", "data")
CHIP = "h100"
STATE_BYTES = 12
"""Of a parameter and its two moments."""


def constrained(case: Case, mesh: Mesh) -> jax.stages.Lowered:
    """`jit` with the state split within a group, and activations by hand over all."""
    rows, within = NamedSharding(mesh, P(AXES)), mesh.shape["data"]
    hand = Hand(activations=lambda x: lax.with_sharding_constraint(x, rows))

    def specs(model: Any, state: Any, devices: int) -> Any:
        del devices
        return programs.state_specs(model, state, within)

    with mock.patch.object(programs, "batch_spec", lambda model: P(AXES)):
        return programs.jitted(case.model, mesh, specs, hand)


def measure(case: Case, group: int, program: str) -> dict[str, Any]:
    """What a program takes on a mesh of groups of so many devices."""
    target, shape = case.target(CHIP), (case.devices // group, group)
    mesh = targets.mesh(target, AXES, shape)
    if program == "shardfn":
        step = programs.sharded(case.model, mesh, axis=AXES)
        lowered = step.lower(*programs.arguments(case.model, mesh.size))
    else:
        lowered = constrained(case, mesh)
    compiled, heap = compiled_with_heap(lowered, PLATFORMS[CHIP], {})
    return played(compiled.as_text() or "", target, mesh) | {"temp": heap}


def kept() -> dict[str, dict[str, Any]]:
    return json.loads(KEPT.read_text()) if KEPT.exists() else {}


def minor_of(version: str) -> str:
    return ".".join(version.split(".")[:2])


def with_replicas(case: Case, version: str) -> dict[str, dict[str, Any]]:
    """The rows of a case's steps with replicas, by the sizes of their meshes."""
    rows = {
        group: kept().get(f"{case.name} {group} shardfn {minor_of(version)}")
        for group in GROUPS.get(case.name, ())
    }
    return {
        f"{case.devices // group} replicas": row for group, row in rows.items() if row
    }


def parameters(case: Case) -> int:
    state, _ = programs.arguments(case.model, case.devices)
    return sum(math.prod(x.shape) for x in jax.tree.leaves(state["params"]))


def line(case: Case, group: int, program: str, row: dict[str, Any]) -> tuple[str, ...]:
    mesh = f"{case.devices // group} x {group}" if group < case.devices else str(group)
    state = STATE_BYTES * parameters(case) / group
    return (
        *(case.name, mesh, program, f"{1e3 * row['step_s']:,.1f} ms"),
        f"{row['exposed_s'] / row['step_s']:.1%}",
        *(f"{size / 2**30:.2f} GiB" for size in (row["temp"], state)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=GROUPS, action="append")
    parser.add_argument("--rerun", action="store_true", help="measure kept rows again")
    parser.add_argument("--kept", action="store_true", help="measure nothing")
    parser.add_argument("--jax", help="the version whose kept rows to print")
    arguments = parser.parse_args()
    version = arguments.jax or jax.__version__
    minor, rows, lines = minor_of(version), kept(), []
    for name in arguments.case or GROUPS:
        case = CASES[name]
        for group in GROUPS[name]:
            for program in ("shardfn", "constrained"):
                key = f"{name} {group} {program} {minor}"
                if not arguments.kept and (arguments.rerun or key not in rows):
                    rows[key] = measure(case, group, program)
                    KEPT.write_text(json.dumps(rows, indent=1) + "\n")
                    print(key, file=sys.stderr, flush=True)
                if key in rows:
                    lines.append(line(case, group, program, rows[key]))
        whole = read(case, CHIP, version)
        for program in ("shardfn", "constrained"):
            lines.append(line(case, case.devices, program, whole[program]))
    head = ("case", "replicas x devices", "program", "step", "exposed")
    print(markdown((*head, "peak temporary", "state"), lines))


if __name__ == "__main__":
    main()
