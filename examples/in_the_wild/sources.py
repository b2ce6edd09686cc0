"""In: the path of somebody's repository, and a file in it. Out: that file as a module,
unedited; what it imports only to read data or to log need not be installed. Of a step
that only the file's main function makes: the step, and what main calls it with.
"""

import dataclasses
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax

NOT_IN_STEPS = (
    *("tensorflow", "tensorflow_datasets", "tensorflow_text", "sentencepiece"),
    *("sklearn", "torch", "torchvision", "diffrax", "matplotlib", "wandb", "PIL"),
    *("tqdm_loggable", "openpi_client", "lerobot", "cv2", "gcsfs", "fsspec", "boto3"),
    *("metrax", "pathwaysutils", "perfetto", "overrides", "tokamax", "drjax"),
    *("tiktoken", "ml_goodput_measurement", "google.cloud", "google.api_core"),
    *("librosa", "sympy", "rigging", "iris", "fray", "finelog", "finestore", "tblib"),
    *("git", "tensorboard", "transformers", "kagglehub", "datasets", "requests"),
    *("tqdm", "rich"),
)
"""Packages that the steps of the gallery do not use, though their files import them."""


class SourceError(ValueError):
    """The path is not of the repository that a program is in."""


class _Any(type):
    """A class that has every attribute, can be called and subclassed."""

    def __getattr__(cls, name: str) -> Any:
        return _attribute(name)

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __getitem__ = __or__

    def __call__(cls, *args: Any, **named: Any) -> Any:
        is_decorator = len(args) == 1 and isinstance(args[0], types.FunctionType)
        return args[0] if is_decorator and not named else cls

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


def anything(name: str) -> Any:
    """What stands in for `name` of a package that is not installed."""
    return _Any(name, (), {})


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages in `NOT_IN_STEPS` that nothing else finds."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        parts = fullname.split(".")
        names = [".".join(parts[:i]) for i in range(1, len(parts) + 1)]
        if not any(name in NOT_IN_STEPS for name in names):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__dict__["__getattr__"] = _attribute
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


def _attribute(name: str) -> Any:
    if name == "__version__":
        return "0.0.0"
    if name.startswith("__"):
        raise AttributeError(name)
    return anything(name)


def load(root: Path, file: str) -> Any:
    """Imports a file of the repository at `root`; of a notebook, its cells."""
    path = root / file
    if not path.is_file():
        raise SourceError(f"{root} has no {file}: give the path of a checkout with it.")
    if not any(isinstance(x, StandIns) for x in sys.meta_path):
        sys.meta_path.append(StandIns())
    package = _package(root, path)
    places = (root, root / "src") if package else (root, root / "src", path.parent)
    sys.path[:0] = [str(p) for p in places if str(p) not in sys.path]
    if path.suffix == ".ipynb":
        return _notebook(path)
    return importlib.import_module(f"{package}.{path.stem}" if package else path.stem)


def _package(root: Path, path: Path) -> str:
    """The package that a file belongs to, as the repository installs it; none where the
    file stands alone. What stands next to a package's file is not imported by its bare
    name, as `optax.py` may be there."""
    names, folder = [], path.parent
    while (folder / "__init__.py").is_file() and folder != root:
        names.insert(0, folder.name)
        folder = folder.parent
    return ".".join(names) if folder in (root, root / "src") else ""


def _notebook(path: Path) -> Any:
    """A notebook's imports, functions and classes, without the cells that use them."""
    module = types.ModuleType(path.stem)
    sys.modules[path.stem] = module
    for cell in json.loads(path.read_text())["cells"]:
        code = "".join(cell["source"])
        if cell["cell_type"] == "code" and code.lstrip().startswith(
            ("import ", "from ", "class ", "def ", "@")
        ):
            exec(compile(code, str(path), "exec"), module.__dict__)
    return module


@dataclasses.dataclass(frozen=True, slots=True)
class FirstCall:
    """What a program's main gives to `jax.jit`, and calls it with.

    Attributes:
      function: the step, before `jax.jit`.
      args: of its first call.
      lowered: as main's own `jax.jit` lowers it, with its shardings.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    lowered: jax.stages.Lowered


class _Reached(BaseException):
    """Leaves main at the first call; nothing that main expects to fail is this."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Watched:
    """What `jax.jit` made of a function, up to its first call."""

    function: Callable[..., Any]
    made: Any
    calls: list[FirstCall]

    def __call__(self, *args: Any) -> None:
        self.calls.append(FirstCall(self.function, args, self.made.lower(*args)))
        raise _Reached

    def __getattr__(self, name: str) -> Any:
        return getattr(self.made, name)


def first_call(main: Callable[[], Any], name: str) -> FirstCall:
    """Runs `main` as it is, up to its first call of the function `name` that it gives
    to `jax.jit`."""
    jit, calls = jax.jit, []

    def watched(*given: Any, **options: Any) -> Any:
        if not given:  # of a decorator with options
            return functools.partial(watched, **options)
        made = jit(*given, **options)
        is_it = getattr(given[0], "__name__", None) == name
        return _Watched(given[0], made, calls) if is_it else made

    with mock.patch.object(jax, "jit", watched):
        try:
            main()
        except _Reached:
            return calls[0]
    raise SourceError(f"main calls no {name} of jax.jit")
