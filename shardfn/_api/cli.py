"""The command line.

In: the name of a step. Out: its report, printed and as a page.

python -m shardfn plan MODULE:STEP --target h100:1x8x8
"""

import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
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
from shardfn._api.local_step import LocalStep
from shardfn._api.option_flags import given_options, with_flags, with_options
from shardfn._api.sharded_step import ShardedStep
from shardfn._core.errors import ShardingError, called_from
from shardfn.analysis import targets
from shardfn.analysis.report import Report

USAGE = """usage: python -m shardfn plan MODULE:STEP [--target h100:1x8x8]

Prints what a step would move, hold and take on a target, and writes it as a page.
python -m shardfn plan --help says more."""

CONVENTION = (
    "Name a function without arguments that returns the step and its arguments:\n\n"
    "    def planned():\n"
    "        return train_step, state, batch  # arrays or jax.ShapeDtypeStruct\n"
)


class CommandError(Exception):
    """A command that cannot be run; its text is what the user reads."""


@dataclass(frozen=True)
class PlanCommand:
    """Prints what a step would move, hold and take on a target, and writes a page."""

    step: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODULE:STEP")]
    """Such as `project.train:planned` or `train.py:planned`: a function without
    arguments that returns a step and its arguments. The step may be plain, or made by
    `fully_shard`; the arguments arrays or `jax.ShapeDtypeStruct`s."""
    target: str | None = None
    """What to compile for, such as `h100:1x8x8` (slices x hosts x GPUs) or
    `tpu:v5p:4x4x4`. Without it only the plan is printed, on the step's own mesh."""
    mesh_shape: tuple[int, ...] | None = None
    """Sizes of the mesh axes on the target, if there are several."""
    html: Path | None = None
    """Where the page goes; `<STEP>-<target>.html` in this folder if left out."""
    check: tyro.conf.FlagCreatePairsOff[bool] = False
    """Exit with 1 if the compiled step is not as planned, or does not fit."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command; exits with 1 and one message if it cannot be run."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return
    if argv[0] != "plan":
        sys.exit(f"error: there is no command {argv[0]!r}.\n{USAGE}")
    if not argv[1:]:
        sys.exit(
            "error: the step is missing: python -m shardfn plan train.py:planned "
            f"--target h100:8\n{CONVENTION}"
        )
    known: type[PlanCommand] = with_flags(PlanCommand)
    command = tyro.cli(known, args=argv[1:], prog="python -m shardfn plan")
    try:
        with called_from(f"{command.step}, by the command line"):
            run_plan(command)
    except (CommandError, ShardingError) as error:
        sys.exit(f"error: {error}")


def run_plan(command: PlanCommand) -> None:
    """Prints the plan, or the report on a target, and writes its page."""
    if command.target is not None:
        check_target(command.target)
        if not (jax.config.jax_platforms or os.environ.get("JAX_PLATFORMS")):  # pyright: ignore
            jax.config.update("jax_platforms", "cpu")
    step, args = load(command.step)
    options = given_options(command)
    if isinstance(step, ShardedStep) and options:
        step = with_options(step, options)
    if command.target is None:
        if not isinstance(step, ShardedStep):
            raise CommandError(
                f"{command.step} gives a step without a mesh to plan for.\n"
                "Pass --target h100:8, or another one, or return what "
                "fully_shard(step, mesh) makes."
            )
        print(step.plan(*args))
        return
    report = compiled_report(command, step, args)
    path = command.html or default_path(command)
    path.write_text(report.html(), encoding="utf-8")
    print(f"{report.plan}\n\n{report}\n\npage: {path}")
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
    if not isinstance(step, ShardedStep):
        options = given_options(command)
        step = sharded_on(command.target, step, command.mesh_shape, options)
    with progress() as show_stage:
        return step.on(
            command.target, *args, mesh_shape=command.mesh_shape, progress=show_stage
        )


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
    """`train_step-h100-1x8x8.html`"""
    assert command.target is not None
    name = command.step.rpartition(":")[2]
    return Path(f"{name}-{command.target.replace(':', '-')}.html")


def load(name: str) -> tuple[Any, tuple[Any, ...]]:
    """The step and its arguments that `MODULE:STEP` names."""
    module_name, colon, attribute = name.rpartition(":")
    if not colon or not module_name or not attribute:
        raise CommandError(f"{name!r} is not of the form MODULE:STEP.\n{CONVENTION}")
    module = _module(module_name)
    if not hasattr(module, attribute):
        there = [n for n, v in vars(module).items() if inspect.isfunction(v)]
        names = ", ".join(there) or "no functions"
        raise CommandError(
            f"{module_name} has no {attribute!r}; it has {names}.\n{CONVENTION}"
        )
    made = getattr(module, attribute)
    if isinstance(made, ShardedStep | LocalStep):
        raise CommandError(
            f"{name} is a step, and its arguments are missing.\n{CONVENTION}"
        )
    if callable(made):
        needed = inspect.signature(made).parameters.values()
        required = [p.name for p in needed if p.default is p.empty and p.kind < 2]
        if required:
            raise CommandError(
                f"{name} takes the arguments {', '.join(required)}.\n{CONVENTION}"
            )
        made = made()
    if not isinstance(made, tuple) or len(made) < 2 or not callable(made[0]):
        raise CommandError(
            f"{name} gave {type(made).__name__}, not a step and its arguments.\n"
            f"{CONVENTION}"
        )
    return made[0], made[1:]


def _module(name: str) -> Any:
    """A module by its dotted name or its file."""
    if not name.endswith(".py"):
        find_also(Path.cwd())
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name.partition(".")[0] and error.name != name:
                raise
            raise CommandError(
                f"there is no module {name!r} here.\nName a module that Python finds "
                "from this folder, or a file such as train.py:planned."
            ) from error
    path = Path(name)
    if not path.is_file():
        raise CommandError(
            f"there is no file {name} (looked in {os.getcwd()}).\nGive its path."
        )
    find_also(path.parent.resolve())
    is_taken = path.stem in sys.modules or path.stem in sys.stdlib_module_names
    name = f"step_in_{path.stem}" if is_taken else path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def find_also(folder: Path) -> None:
    """Lets Python find modules of a folder: before installed ones, and behind those of
    its own library, which a file such as `json.py` must not replace."""
    library = {
        os.path.realpath(sysconfig.get_path(k)) for k in ("stdlib", "platstdlib")
    }
    own = [i for i, p in enumerate(sys.path) if os.path.realpath(p) in library]
    sys.path.insert(max(own, default=-1) + 1, str(folder))


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
