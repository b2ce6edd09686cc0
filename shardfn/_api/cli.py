"""The command line.

In: the name of a step. Out: its report, printed and as a page; or the options with
which it is fastest on a target.

python -m shardfn plan MODULE:STEP --target h100:64
python -m shardfn tune MODULE:STEP --target h100:64
"""

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from shardfn._api.fully_shard import fully_shard
from shardfn._api.load_step import CONVENTION, CommandError, load
from shardfn._api.local_step import LocalStep
from shardfn._api.option_flags import given_options, with_flags
from shardfn._api.sharded_step import ShardedStep
from shardfn._api.tuning.asked_rows import Also
from shardfn._api.tuning.candidates import Tuning
from shardfn._api.tuning.changed_options import with_options
from shardfn._api.tuning.tune import tune
from shardfn._core.errors import ShardingError, called_from
from shardfn._core.tuning_limits import LEAST_MEMORY, TUNED_COMPILATIONS
from shardfn.analysis import targets
from shardfn.analysis.report import Report

USAGE = """usage: python -m shardfn plan MODULE:STEP [--target h100:64 [--tune]]
       python -m shardfn tune MODULE:STEP --target h100:64 [--memory 70GiB]

plan prints what a step would move, hold and take on a target, and writes it as a page.
tune compiles it there with other options, and says with which it is fastest.
Each with --help says more."""


@dataclass(frozen=True)
class PlanCommand:
    """Prints what a step would move, hold and take on a target, and writes a page."""

    step: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODULE:STEP")]
    """Such as `project.train:planned` or `train.py:planned`: a function without
    arguments that returns a step and its arguments. The step may be plain, or made by
    `fully_shard`; the arguments arrays or `jax.ShapeDtypeStruct`s."""
    target: str | None = None
    """What to compile for, such as `h100:64` or `tpu:v5p:4x4x4`. Without it only the
    plan is printed, on the step's own mesh."""
    mesh_shape: tuple[int, ...] | None = None
    """Sizes of the mesh axes on the target, if there are several."""
    html: Path | None = None
    """Where the page goes; `<STEP>-<target>.html` in this folder if left out."""
    check: tyro.conf.FlagCreatePairsOff[bool] = False
    """Exit with 1 if the compiled step is not as planned, or does not fit."""
    tune: tyro.conf.FlagCreatePairsOff[bool] = False
    """Compile what the report advises, too, and say what it makes of the step."""


@dataclass(frozen=True)
class TuneCommand:
    """Finds the options with which a step is fastest on a target, by compiling it."""

    step: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODULE:STEP")]
    """Such as `project.train:planned` or `train.py:planned`: a function without
    arguments that returns a step and its arguments. The step may be plain, or made by
    `fully_shard`; the arguments arrays or `jax.ShapeDtypeStruct`s."""
    target: str
    """What to compile for, such as `h100:64` or `tpu:v5p:4x4x4`."""
    memory: str | None = None
    """What a step may take on each device, such as `70GiB`; the target's if left
    out."""
    compilations: int = TUNED_COMPILATIONS
    """How many programs are compiled at most."""
    mesh_shape: tuple[int, ...] | None = None
    """Sizes of the mesh axes on the target, if there are several."""
    also: tuple[Also, ...] = ()
    """What to try, too: state in the host's memory if the step does not fit, and
    parameters or gradients that move in bfloat16 or int8, which rounds them."""
    out: Path | None = None
    """Where the options go, as a file that `fully_shard(options=path)` reads."""
    html: Path | None = None
    """Where a page goes that shows the candidates beside each other."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command; exits with 1 and one message if it cannot be run."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return
    name, flags = argv[0], argv[1:]
    commands = {"plan": (PlanCommand, run_plan), "tune": (TuneCommand, run_tune)}
    if name not in commands:
        sys.exit(f"error: there is no command {name!r}.\n{USAGE}")
    if not flags:
        sys.exit(
            f"error: the step is missing: python -m shardfn {name} train.py:planned "
            f"--target h100:8\n{CONVENTION}"
        )
    kind, run = commands[name]
    command: Any = tyro.cli(
        with_flags(kind), args=flags, prog=f"python -m shardfn {name}"
    )
    try:
        with called_from(f"{command.step}, by the command line"):
            run(command)
    except (CommandError, ShardingError) as error:
        sys.exit(f"error: {error}")


def run_tune(command: TuneCommand) -> None:
    """Prints the candidates and the options chosen, and writes these."""
    prepare(command.target)
    memory = None if command.memory is None else bound_of(command.memory)
    if command.compilations < 1:
        raise CommandError(f"--compilations {command.compilations}: pass one or more.")
    for path in (command.out, command.html):
        if path is not None and not path.absolute().parent.is_dir():
            raise CommandError(
                f"{path} cannot be written: there is no folder {path.parent}.\n"
                "Make it first: compiling takes minutes."
            )
    step, args = load(command.step)
    found = tuned(command, step, args, memory, command.compilations, command.also)
    print(found)
    fits = found.chosen.fits(found.memory)
    if command.out is not None and not fits:
        print(f"\noptions: {command.out} is not written, as nothing fits")
    elif command.out is not None:
        found.save(command.out)
        print(f"\noptions: {command.out}; fully_shard(options={str(command.out)!r})")
    if command.html is not None:
        command.html.write_text(found.html(), encoding="utf-8")
        print(f"page: {command.html}")
    if not fits:
        sys.exit(1)


def tuned(
    command: PlanCommand | TuneCommand,
    step: Any,
    args: tuple[Any, ...],
    memory: int | None = None,
    compilations: int = TUNED_COMPILATIONS,
    also: tuple[Also, ...] = (),
) -> Tuning:
    """What tuning finds on the command's target; shows stages meanwhile."""
    assert command.target is not None
    with progress() as show_stage:
        return tune(
            sharded_for(command, step),
            command.target,
            *args,
            memory=memory,
            compilations=compilations,
            mesh_shape=command.mesh_shape,
            also=also,
            progress=show_stage,
        )


def bytes_of(text: str) -> int:
    """`70GiB`, `80 GB` or a number of bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(\w*)\s*", text)
    if match is None or match[2].lower() not in UNITS:
        raise CommandError(
            f"--memory {text!r} is no size.\nWrite 70GiB, 80GB or a number of bytes."
        )
    return int(float(match[1]) * UNITS[match[2].lower()])


def bound_of(text: str) -> int:
    """The same of what a step may take on each device."""
    size = bytes_of(text)
    if size < LEAST_MEMORY:
        raise CommandError(
            f"--memory {text!r} is {size} bytes, which lacks its unit, it seems "
            "(limits.LEAST_MEMORY).\nWrite a unit: 70GiB or 80GB."
        )
    return size


UNITS = {"": 1, "b": 1} | {
    f"{letter}{kind}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for kind, base in (("b", 1000), ("ib", 1024))
}


def prepare(target: str) -> None:
    """Refuses a wrong target, and leaves accelerators alone that may be there."""
    check_target(target)
    if not (jax.config.jax_platforms or os.environ.get("JAX_PLATFORMS")):  # pyright: ignore
        jax.config.update("jax_platforms", "cpu")


def run_plan(command: PlanCommand) -> None:
    """Prints the plan, or the report on a target, and writes its page."""
    if command.target is not None:
        prepare(command.target)
    step, args = load(command.step)
    if command.target is None:
        if command.tune:
            raise CommandError("--tune compiles for a target: pass --target h100:8.")
        if not isinstance(step, ShardedStep):
            raise CommandError(
                f"{command.step} gives a step without a mesh to plan for.\n"
                "Pass --target h100:8, or another one, or return what "
                "fully_shard(step, mesh) makes."
            )
        print(sharded_for(command, step).plan(*args))
        return
    found = tuned(command, step, args) if command.tune else None
    first = found.candidates[0].report if found else None
    report = first or compiled_report(command, step, args)
    path = command.html or default_path(command)
    path.write_text(report.html(), encoding="utf-8")
    measured = f"\n\n{found}" if found else ""
    print(f"{report.plan}\n\n{report}{measured}\n\npage: {path}")
    if command.check and not (report.verification.ok and report.fits):
        sys.exit(1)


def check_target(name: str) -> None:
    """Refuses a wrong name, or one whose compiler is missing, before anything runs."""
    try:
        reason = targets.missing(name)
    except ValueError as error:
        raise CommandError(str(error)) from error
    if reason:
        raise CommandError(reason)


def compiled_report(command: PlanCommand, step: Any, args: tuple[Any, ...]) -> Report:
    """The report on the target; shows stages and seconds on the terminal meanwhile."""
    assert command.target is not None
    with progress() as show_stage:
        return sharded_for(command, step).on(
            command.target, *args, mesh_shape=command.mesh_shape, progress=show_stage
        )


def sharded_for(command: PlanCommand | TuneCommand, step: Any) -> ShardedStep:
    """The step with the options of the command, over its target's devices unless it has
    a mesh."""
    given = given_options(command)
    if isinstance(step, ShardedStep):
        return with_options(step, given) if given else step
    assert command.target is not None
    return sharded_on(command.target, step, command.mesh_shape, given)


def sharded_on(
    name: str,
    step: Any,
    shape: tuple[int, ...] | None,
    given: Mapping[str, Any] | None = None,
) -> ShardedStep:
    """A plain or local step, sharded over a target's devices, with the options that are
    `given` besides its own."""
    options: Mapping[str, Any] = {}
    names = ("data",)
    if isinstance(step, LocalStep):
        names, options, step = step.names, step.options, step.plain.step
    if shape is not None and len(shape) != len(names):
        raise CommandError(
            f"--mesh-shape {' '.join(map(str, shape))} has {len(shape)} sizes, and the "
            f"step's mesh has the axes {names}.\n"
            "Return what fully_shard makes with the axes that you want."
        )
    options = {**options, **(given or {})}
    sharded: Any = fully_shard(step, targets.mesh(name, names, shape), **options)
    return sharded


def default_path(command: PlanCommand) -> Path:
    """`train_step-h100-64.html`"""
    assert command.target is not None
    name = command.step.rpartition(":")[2]
    return Path(f"{name}-{command.target.replace(':', '-')}.html")


@contextmanager
def progress() -> Iterator[Any]:
    """A function that shows a stage, with a clock, until the next or the end."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console) as shown:
        last: list[Any] = []

        def show_stage(stage: str) -> None:
            for task in last:
                shown.update(task, total=1, completed=1)
            last[:] = [shown.add_task(stage, total=None)]

        yield show_stage
        for task in last:
            shown.update(task, total=1, completed=1)
