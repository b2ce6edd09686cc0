"""Plans of all cases that need no compiler of GPUs or TPUs, before and after a change.

A folder with one file per case is written from the installed tree, through its public
names alone, so an older tree can write one too; two folders are then compared. Cases
are the criteria's models, the unrolled transformer of `planning.py` and the programs of
tests/programs, some with options, on CPU devices. With `--lowered` a file also holds
the hash of the program that XLA is given.

    git worktree add /tmp/before main
    PYTHONPATH=/tmp/before python benchmarks/same_plans.py write /tmp/old --lowered
    PYTHONPATH=$PWD python benchmarks/same_plans.py write /tmp/new --lowered
    python benchmarks/same_plans.py compare /tmp/old /tmp/new
    python benchmarks/same_plans.py compare /tmp/old /tmp/new --without phase path
"""

import argparse
import dataclasses
import hashlib
import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import criteria_programs
import jax
import planning
import programs
from criteria_cases import CASES, Model

import shardfn

Planned = tuple[Any, Any, Any]
"""A sharded step, its state and its batch as shapes."""

OPTIONS: dict[str, dict[str, Any]] = {
    "prefetch": {"prefetch": 1},
    "bucket": {"bucket_bytes": 2**20, "reduce_dtype": "float32"},
    "gather": {"gather_dtype": "bfloat16", "accumulate": "defer"},
    "keep": {"reshard_after_forward": False},
    "reshard": {"reshard_after_forward": True, "accumulate": "scatter"},
}
WITH_OPTIONS = (
    "gpt_scan_remat_bf16",
    "gpt_tied",
    "accumulate_scan",
    "loops_and_branches",
    "loss_scale_cond",
)
"""Programs that are planned with each of the `OPTIONS` and on two mesh axes, too."""

DEVICES = 512
TESTED = 8
"""Devices that the programs of tests/programs are planned for, as the tests are."""


def mesh_of(*sizes: int) -> jax.sharding.Mesh:
    names = ("replica", "data")[-len(sizes) :]
    count = sizes[0] * sizes[-1] if len(sizes) > 1 else sizes[0]
    return jax.make_mesh(sizes, names, devices=jax.devices()[:count])


def of_criterion(model: Model, devices: int) -> Planned:
    step = criteria_programs.sharded(model, mesh_of(devices))
    return step, *criteria_programs.arguments(model, devices)


def of_transformer(layers: int) -> Planned:
    step, state, batch = planning.make_step(layers)
    mesh = mesh_of(TESTED)
    return shardfn.fully_shard(step, mesh, min_size=planning.WIDTH + 1), state, batch


def of_program(name: str, *sizes: int, **options: Any) -> Planned:
    program, mesh = programs.get(name), mesh_of(*sizes)
    axis = mesh.axis_names if len(sizes) > 1 else "data"
    spec = {"batch_spec": program.batch_spec}
    step = shardfn.fully_shard(
        program.step, mesh, axis=axis, min_size=8, **spec, **options
    )
    state = jax.eval_shape(program.init, jax.random.key(0))
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), program.batch(0)
    )
    return step, state, batch


def cases() -> Iterator[tuple[str, Callable[[], Planned]]]:
    for name, case in CASES.items():
        if case.devices <= DEVICES:
            yield name, lambda c=case: of_criterion(c.model, c.devices)
    yield "planning-12", lambda: of_transformer(12)
    for name in programs.names():
        yield f"program-{name}", lambda n=name: of_program(n, TESTED)
    for name in WITH_OPTIONS:
        yield f"program-{name}-2x4", lambda n=name: of_program(n, 2, 4)
        for label, options in OPTIONS.items():
            yield (
                f"program-{name}-{label}",
                lambda n=name, o=options: of_program(n, TESTED, **o),
            )


def fields_of(collective: Any) -> dict[str, Any]:
    """The fields of a line that are text, numbers, or tuples of these."""
    names = [f.name for f in dataclasses.fields(collective)]
    values = {name: getattr(collective, name) for name in names}
    return {name: value for name, value in values.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int)


def record(make: Callable[[], Planned], lowered: bool) -> dict[str, Any]:
    """What is compared of a case; its error, if it has no plan."""
    try:
        step, state, batch = make()
        plan = step.plan(state, batch)
        text = step.lower(state, batch).as_text() if lowered else ""
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "M": plan.parameter_bytes,
        "wire bytes": plan.wire_bytes,
        "collectives": [fields_of(c) for c in plan.collectives],
        "printed": str(plan).splitlines(),
        "lowered": hashlib.sha256(text.encode()).hexdigest() if lowered else "",
    }


def write(folder: Path, lowered: bool, only: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in cases():
        if only not in name:
            continue
        with warnings.catch_warnings(action="ignore"):
            found = record(make, lowered)
        (folder / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
        jax.clear_caches()


def differences(old: Any, new: Any, without: list[str]) -> list[str]:
    """What differs between two records, a line each."""
    lines = [
        f"{key}: {old.get(key)} -> {new.get(key)}"
        for key in ("error", "M", "wire bytes")
        if key not in without and old.get(key) != new.get(key)
    ]
    if old.get("lowered") and new.get("lowered") and old["lowered"] != new["lowered"]:
        lines += ["lowered"] * ("lowered" not in without)
    olds, news = old.get("collectives", []), new.get("collectives", [])
    common = set(olds[0] if olds else ()) & set(news[0] if news else ())
    if len(olds) == len(news):
        fields = Counter(
            field
            for one, other in zip(olds, news, strict=True)
            for field in sorted(common - set(without))
            if one[field] != other[field]
        )
        lines += [f"{field} of {n} collectives" for field, n in fields.items()]
    else:
        lines += [f"collectives: {len(olds)} -> {len(news)}"]
    printed = old.get("printed") != new.get("printed")
    return lines + ["printed"] * (printed and "printed" not in without)


def compare(before: Path, after: Path, without: list[str]) -> int:
    """Prints what differs, a line per case; returns how many cases do."""
    names = sorted({f.name for folder in (before, after) for f in folder.iterdir()})
    changed = 0
    for name in names:
        pair = [
            json.loads(f.read_text()) if f.exists() else {"error": "not there"}
            for f in (before / name, after / name)
        ]
        lines = differences(*pair, without)
        changed += bool(lines)
        if lines:
            print(f"{name.removesuffix('.json')}: {'; '.join(lines)}")
    print(f"{len(names)} cases, {changed} differ")
    return changed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write", help="plan every case into a folder")
    writing.add_argument("folder", type=Path)
    writing.add_argument("--lowered", action="store_true", help="and lower it")
    writing.add_argument("--only", default="", help="cases with this in their name")
    comparing = commands.add_parser("compare", help="what two folders disagree about")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--without", nargs="*", default=[], metavar="FIELD")
    arguments = parser.parse_args()
    if arguments.command == "compare":
        return compare(arguments.before, arguments.after, arguments.without) > 0
    jax.config.update("jax_num_cpu_devices", DEVICES)
    write(arguments.folder, arguments.lowered, arguments.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
