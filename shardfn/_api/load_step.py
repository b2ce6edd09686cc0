"""A step that the command line names.

In: `MODULE:STEP`. Out: the step and its arguments, or an error that says what to write.
"""

import contextlib
import importlib
import importlib.util
import inspect
import itertools
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardfn._api.local_step import LocalStep
from shardfn._api.sharded_step import ShardedStep
from shardfn._core import compat
from shardfn._core.errors import ShardingError

CONVENTION = (
    "Name a function without arguments that returns the step and its arguments:\n\n"
    "    def planned():\n"
    "        return train_step, state, batch  # arrays or jax.ShapeDtypeStruct\n"
)

_LOADERS = ("<frozen ", str(Path(importlib.__file__).parent), contextlib.__file__)


class CommandError(Exception):
    """A command that cannot be run; its text is what the user reads."""


def load(name: str) -> tuple[Any, tuple[Any, ...]]:
    """The step and its arguments that `MODULE:STEP` names."""
    module_name, colon, attribute = name.rpartition(":")
    if not colon or not module_name or not attribute:
        raise CommandError(f"{name!r} is not of the form MODULE:STEP.\n{CONVENTION}")
    with _running(module_name):
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
        with _running(name):
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


@contextlib.contextmanager
def _running(name: str) -> Iterator[None]:
    """Says of an error of the user's own code where in it that is, without how the
    command came there."""
    try:
        yield
    except (CommandError, ShardingError):
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        of_user = itertools.dropwhile(
            lambda frame: frame.filename.startswith((compat.PACKAGE, *_LOADERS)), frames
        )
        cause = error.__cause__
        behind = f"It comes of {type(cause).__name__}: {cause}\n" if cause else ""
        raise CommandError(
            f"{name} raised an error of its own: {type(error).__name__}: {error}\n"
            f"{''.join(traceback.format_list([*of_user]))}{behind}"
            "Mend it there; Python has to run it before the step can be planned."
        ) from error


def find_also(folder: Path) -> None:
    """Lets Python find modules of a folder: before installed ones, and behind those of
    its own library, which a file such as `json.py` must not replace."""
    library = {
        os.path.realpath(sysconfig.get_path(k)) for k in ("stdlib", "platstdlib")
    }
    own = [i for i, p in enumerate(sys.path) if os.path.realpath(p) in library]
    sys.path.insert(max(own, default=-1) + 1, str(folder))
