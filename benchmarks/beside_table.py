"""In: steps, each as shardfn's program and as those of others. Out: a table of what
each sends, holds and takes, compiled for machines that are not there; rows that were
measured once are kept.
"""

import argparse
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import beside
import jax
from criteria_cases import CHIPS, Case
from jax.sharding import Mesh, NamedSharding

import shardfn

HEADER = ("case", "chip", "program", "sent", "of M", "peak temporary", "predicted")
PROGRAMS = ("shardfn", "jit", "constrained")

Constrain = Callable[[jax.Array], jax.Array]
"""What is done by hand to values of which dimension 0 is rows of the batch."""


def constrain(mesh: Mesh, program: str) -> Constrain:
    """Nothing, but for the program that is constrained by hand."""
    rows = NamedSharding(mesh, beside.ROWS)
    if program != "constrained":
        return lambda x: x
    return lambda x: jax.lax.with_sharding_constraint(x, rows)


def measured(
    program: str,
    make_step: Callable[[Constrain], Callable[..., Any]],
    args: tuple[Any, Any],
    mesh: Mesh,
    target: str,
    shown: bool = False,
) -> dict[str, Any]:
    """Compiles one program; a row of JSON, with `error` if the compiler refuses.

    Args:
      program: one of `PROGRAMS`.
      make_step: the plain step, with this done by hand.
      args: state, a dict with `params`, and batch, as shapes.
      mesh: of the target.
      target: for which to compile.
      shown: whether to print shardfn's plan.

    Returns:
      The row.
    """
    step = shardfn.fully_shard(make_step(lambda x: x), mesh)
    row: dict[str, Any] = {"jax": jax.__version__}
    if program == "shardfn":
        if shown:
            print(step.plan(*args), end="\n\n")
        lowered = step.lower(*args)
    else:
        lowered = beside.jitted(make_step(constrain(mesh, program)), step, args)
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        return row | {"error": str(error).splitlines()[0]}
    if program == "shardfn":
        checked = step.plan(*args).verify(compiled.as_text() or "")
        row |= {"as_planned": checked.ok, "problems": checked.problems()}
    elements = sum(x.size for x in jax.tree.leaves(args[0]["params"]))
    return row | asdict(beside.figures(compiled, mesh, target)) | {"M": 2 * elements}


def print_table(
    description: str | None,
    cases: Mapping[str, Case],
    results: Path,
    measure: Callable[[str, str, str, bool], dict[str, Any]],
    chips: Sequence[str] = CHIPS,
) -> None:
    """Reads the command line, and prints the rows that it asks for.

    Args:
      description: of the command.
      cases: by name.
      results: the file that keeps rows.
      measure: the row of a case, a chip and a program, and whether to show its plan.
      chips: to choose from.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=cases, action="append")
    parser.add_argument("--chip", choices=chips, action="append")
    parser.add_argument("--program", choices=PROGRAMS, action="append")
    parser.add_argument("--rerun", action="store_true", help="measure kept rows again")
    parser.add_argument(
        "--plan", action="store_true", help="print a measured plan, too"
    )
    args = parser.parse_args()
    kept = json.loads(results.read_text()) if results.exists() else {}
    for cells in (HEADER, ["---"] * len(HEADER)):
        print(f"| {' | '.join(cells)} |")
    chosen = args.case or cases, args.chip or chips, args.program or PROGRAMS
    for names in itertools.product(*chosen):
        key = " ".join(names)
        if args.rerun or key not in kept:
            kept[key] = measure(*names, args.plan)
            results.write_text(json.dumps(kept, indent=1) + "\n")
        print(f"| {' | '.join([*names, *_cells(kept[key])])} |", flush=True)


def _cells(row: Mapping[str, Any]) -> list[str]:
    if "error" in row:
        full = "Ran out of memory" in row["error"]
        return ["does not fit" if full else row["error"], "", "", ""]
    planned = "" if row.get("as_planned", True) else ", not as planned"
    return [
        f"{row['wire'] / 2**30:,.1f} GiB{planned}",
        f"{row['wire'] / row['M']:.2f} M",
        f"{row['temporary'] / 2**30:,.1f} GiB",
        f"{row['seconds']:,.2f} s",
    ]
