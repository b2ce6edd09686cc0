"""How near the programs of `criteria.py` come to what can be reached, in one table: the
step without options and the fastest that was tried, beside the best baseline's; what
the device waits for, and how much of that no order of transfers saves; the memory, and
what activations and two layers alone would take; and the memory's traffic.

Reads the kept rows of `criteria.py` and `replicas.py`. What is its own is kept in
`results/floors.json`, and measured where it is missing: a minute a case for H100s, some
minutes for v5ps. Needs the extra `aot`.

    python benchmarks/goals.py
    python benchmarks/goals.py --jax 0.12 --kept
    python benchmarks/goals.py --case llama-7b-64 --chip v5p --rerun
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import criteria_programs as programs
import jax
from activations import temporary
from criteria import read
from criteria_cases import CASES, CHIPS, Case
from criteria_measure import ASKED, BASELINES, PLATFORMS
from criteria_models import STACKS, init
from criteria_table import SHARDED, best, markdown
from replicas import CHIP, with_replicas

from shardfn._core.tuning_limits import TUNED_SHARE
from shardfn.analysis import targets
from shardfn.analysis._hlo.play import play
from shardfn.analysis._rates import rates_of

FLOORS = Path(__file__).parent / "results" / "floors.json"
JUDGED = [case for case in CASES.values() if 2 in case.criteria]
HEAD = (
    *("case", "chip", "step", "of the best baseline", "exposed"),
    *("tuned", "of it", "exposed", "in any order", "with none"),
    *("peak temporary", "of the best baseline", "activations and two layers"),
    "memory traffic",
)
GOALS = (
    *("goal", "", "", "0.88", "", "", "0.80", "2%", "", ""),
    *("", "0.9, never above 1.05", "", "1.05"),
)


def key_of(case: Case, chip: str, version: str) -> str:
    """Case, chip and the minor version of JAX."""
    return f"{case.name} {chip} {'.'.join(version.split('.')[:2])}"


def kept() -> dict[str, dict[str, float]]:
    return json.loads(FLOORS.read_text()) if FLOORS.exists() else {}


def measure(case: Case, chip: str) -> dict[str, float]:
    """What this case takes at least: `activations`, in bytes, and the part of the step
    that the device waits in any order of what an iteration moves."""
    target = case.target(chip)
    mesh = targets.mesh(target)
    arguments = programs.arguments(case.model, mesh.size)
    compiled = programs.sharded(case.model, mesh).lower(*arguments).compile()
    rates = rates_of(targets.target(target), mesh)
    timeline = play(compiled.as_text() or "", rates)
    return {
        "activations": temporary(case, chip, PLATFORMS[chip]),
        "in_any_order": timeline.exposed_in_any_order / timeline.seconds,
    }


def two_layers(case: Case) -> int:
    """Bytes of the weights and the gradients, in bfloat16, of two layers; of a model of
    two stacks, of the larger one."""
    params = jax.eval_shape(lambda: init(case.model))
    sizes = (
        sum(leaf.size for leaf in jax.tree.leaves(params[name])) // case.model.layers
        for name in STACKS
        if name in params
    )
    return 2 * 2 * 2 * max(sizes)


def line(case: Case, chip: str, rows: dict[str, Any], floor: Any) -> tuple[str, ...]:
    """A row of the table: what it lacks is empty."""
    ours = rows["shardfn"]
    if "step_s" not in ours:
        return case.name, chip, *[""] * (len(HEAD) - 2)
    name, tuned = fastest(case, chip, rows)
    _, least = best(rows, SHARDED, "step_s")
    _, memory = best(rows, list(BASELINES), "temp")
    in_any_order = floor["in_any_order"] if floor else None
    none = _share(tuned["step_s"] - tuned["exposed_s"], least)
    within = floor["activations"] + two_layers(case) if floor else None
    traffic = rows.get("constrained", {}).get("memory_s")
    return (
        *(case.name, chip, _step(ours), _share(ours["step_s"], least), _waits(ours)),
        name,
        *(_share(tuned["step_s"], least), _waits(tuned)),
        f"{in_any_order:.1%}" if in_any_order is not None else "",
        none,
        *(f"{ours['temp'] / 2**30:.2f} GiB", _share(ours["temp"], memory)),
        _share(within, memory),
        _share(ours["memory_s"], traffic),
    )


def fastest(case: Case, chip: str, rows: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """What takes the least time, of all that was tried; of those that a prediction does
    not tell apart, what waits least."""
    tried = {"as it is": rows["shardfn"]} | {
        name.removeprefix("shardfn "): rows[name] for name in ASKED if name in rows
    }
    if chip == CHIP:
        tried |= with_replicas(case, rows["shardfn"]["jax"])
    tried = {name: row for name, row in tried.items() if "step_s" in row}
    enough = min(row["step_s"] for row in tried.values()) * (1 + TUNED_SHARE)
    alike = {name: row for name, row in tried.items() if row["step_s"] <= enough}
    name = min(alike, key=lambda name: alike[name]["exposed_s"])
    return name, tried[name]


def _step(row: dict[str, Any]) -> str:
    return f"{1e3 * row['step_s']:,.1f} ms"


def _waits(row: dict[str, Any]) -> str:
    return f"{row['exposed_s'] / row['step_s']:.1%}"


def _share(ours: float | None, theirs: float | None) -> str:
    if ours is None or theirs is None or theirs == float("inf"):
        return ""
    return f"{ours / theirs:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=[c.name for c in JUDGED], action="append")
    parser.add_argument("--chip", choices=CHIPS, action="append")
    parser.add_argument("--rerun", action="store_true", help="measure kept rows again")
    parser.add_argument("--kept", action="store_true", help="measure nothing")
    parser.add_argument("--jax", help="the version whose kept rows to print")
    arguments = parser.parse_args()
    version = arguments.jax or jax.__version__
    lines, floors = [GOALS], kept()
    for case in JUDGED:
        for chip in arguments.chip or CHIPS:
            rows = read(case, chip, version)
            if (arguments.case and case.name not in arguments.case) or not rows:
                continue
            key = key_of(case, chip, version)
            if not (arguments.kept or arguments.jax):
                if arguments.rerun or key not in floors:
                    start = time.perf_counter()
                    floors[key] = measure(case, chip)
                    FLOORS.write_text(json.dumps(floors, indent=1) + "\n")
                    took = time.perf_counter() - start
                    print(f"{key}: {took:.0f} s", file=sys.stderr, flush=True)
            lines.append(line(case, chip, rows, floors.get(key)))
    print(markdown(HEAD, lines))


if __name__ == "__main__":
    main()
