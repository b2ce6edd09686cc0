"""What `shardfn.tune` finds for a case of the criteria: a row per set of options that
it compiles, for H100s or TPU v5ps that are not there (extra `aot`).

    python benchmarks/tuning.py --case gpt-175b-512
    python benchmarks/tuning.py --case gpt-1.3b-8 --html tuned.html
    python benchmarks/tuning.py --case llama-7b-64 --report    # compiles it once
"""

import argparse
import sys
from pathlib import Path

import criteria_programs as programs
import jax
from criteria_cases import CASES

import shardfn
from shardfn.analysis import targets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, default="gpt-1.3b-8")
    parser.add_argument("--chip", choices=("h100", "v5p"), default="h100")
    parser.add_argument("--compilations", type=int, default=8)
    parser.add_argument("--report", action="store_true", help="of the step as it is")
    parser.add_argument("--html", type=Path, help="a page of all candidates")
    given = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    case = CASES[given.case]
    target = case.target(given.chip)
    mesh = targets.mesh(target)
    step = programs.sharded(case.model, mesh)
    state, batch = programs.arguments(case.model, mesh.size)

    def show(stage: str) -> None:
        print(stage, file=sys.stderr, flush=True)

    if given.report:
        print(step.on(target, state, batch, progress=show))
        return
    most = given.compilations
    args = state, batch
    found = shardfn.tune(step, target, *args, compilations=most, progress=show)
    print(found)
    if given.html:
        given.html.write_text(found.html(), encoding="utf-8")


if __name__ == "__main__":
    main()
