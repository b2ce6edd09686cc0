"""Options that tuning chose, as a file, and the program that they were chosen for.

In: options, or the path of a file. Out: the file, or the options; an error where the
program is another one.
"""

import ast
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jax

from shardfn._core.errors import ShardingError, call_site, called, step_name
from shardfn._core.leaf_options import LEAF_OPTIONS
from shardfn._core.leaves import Leaf, leaf_name
from shardfn.analysis._program_hash import operations_hash

FORMAT = "tuned options of shardfn, 3"
"""What a file says that it is; another number is another layout."""


@dataclass(frozen=True, slots=True)
class TunedOptions:
    """Options of `fully_shard`, and what they were chosen for.

    Attributes:
      step: name of the plain step.
      target: the machine's name.
      platform: "cuda" or "tpu", for which the compiler's options are.
      jax: its version.
      state: the state's leaves, by name and what each is: "params/w float32[8,16]".
      program: a hash of the step's operations, without their sizes.
      options: names and values.
      place: the file and the call of `fully_shard`, if they come from one.
    """

    step: str
    target: str
    platform: str
    jax: str
    state: tuple[str, ...]
    program: str
    options: tuple[tuple[str, Any], ...]
    place: str = ""

    def of_leaves(self) -> dict[str, Any]:
        """Those that may differ from leaf to leaf."""
        return {name: v for name, v in self.options if name in LEAF_OPTIONS}

    def of_compiler(self, platform: str) -> dict[str, Any]:
        """Those of the compiler, if it is the one that they are for."""
        same = {"gpu": "cuda"}.get(platform, platform) == self.platform
        return dict(dict(self.options).get("compiler_options", {})) if same else {}

    @property
    def latencies(self) -> Any:
        """Whose figures the compiler's scheduler goes by; None if nothing is said."""
        return dict(self.options).get("latencies")

    def check(self, jaxpr: Any, leaves: Sequence[Leaf]) -> None:
        """Raises if the step is not the one that the options were chosen for.

        Args:
          jaxpr: the traced step.
          leaves: of its state.

        Raises:
          ShardingError: its state or its operations are others.
        """
        named = ((leaf_name(x.path), x.aval.shape, str(x.aval.dtype)) for x in leaves)
        changed = _changed(self.state, state_of(named))
        if not changed and operations_hash(jaxpr) == self.program:
            return
        name = step_name()
        what = f"operations of {name} are not those"
        if changed:
            what = f"state of {name} is not that"
            changed = f": {changed}"
        versions = ""
        if self.jax != jax.__version__:
            versions = f", with jax {self.jax}, where this is {jax.__version__}"
        raise ShardingError(
            f"options={self.place}: they were tuned for another program: the {what} "
            f"of {self.step} as it was then{changed}{versions}.\n"
            f"{called()}Tune again, or write the options that you want into the call "
            f"of fully_shard: {self.texts()}."
        )

    def texts(self) -> str:
        """The options as users write them."""
        return ", ".join(f"{n}={v!r}" for n, v in self.options) or "there are none"


def state_of(
    leaves: Iterable[tuple[str, Sequence[int], str]],
) -> tuple[str, ...]:
    """What a file says of a state, of the names, shapes and dtypes of its leaves."""
    return tuple(
        f"{name} {dtype}[{','.join(map(str, shape))}]" for name, shape, dtype in leaves
    )


def _changed(before: Sequence[str], now: Sequence[str]) -> str:
    """The first leaf in which two states differ, in words; empty if they are alike."""
    if before == now:
        return ""
    old, new = (dict(leaf.rsplit(" ", 1) for leaf in x) for x in (before, now))
    for name, kind in new.items():
        if name not in old:
            return f"'{name}', {kind}, is new"
        if old[name] != kind:
            return f"'{name}' is {kind} and was {old[name]}"
    for name, kind in old.items():
        if name not in new:
            return f"'{name}', {kind}, is gone"
    return "its leaves have another order"


def write(path: Path, tuned: TunedOptions) -> None:
    """Writes a file, or leaves the one that is there."""
    data = {
        "format": FORMAT,
        **{name: getattr(tuned, name) for name in _TEXTS},
        "state": tuned.state,
        "options": {name: repr(value) for name, value in tuned.options},
    }
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


_TEXTS = ("step", "target", "platform", "jax", "program")


def read(path: str | os.PathLike[str]) -> TunedOptions:
    """Reads a file that `Tuning.save` wrote.

    Args:
      path: of the file.

    Returns:
      The options.

    Raises:
      ShardingError: there is no such file, or it is not one of tuned options.
    """
    place = repr(os.fspath(path) if isinstance(path, os.PathLike) else path)
    if not isinstance(path, (str, os.PathLike)):
        _refuse(place, "is no path. Options themselves are passed by their names")
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError) as error:
        _refuse(place, f"cannot be read: {error}", error)
    found = data.get("format") if isinstance(data, Mapping) else None
    if found != FORMAT:
        layout = str(found).removeprefix(FORMAT[:-1])
        other = f", {layout} in place of {FORMAT[-1]}: tune again"
        _refuse(place, f"is of another format{other if layout.isdigit() else ''}")
    texts = {name: data.get(name) for name in _TEXTS}
    state, options = data.get("state"), data.get("options")
    if (
        not all(isinstance(x, str) for x in texts.values())
        or not isinstance(state, list)
        or not all(isinstance(x, str) and " " in x for x in state)
        or not isinstance(options, Mapping)
    ):
        _refuse(place, f"lacks one of {', '.join(_TEXTS)}, state and options")
    values = tuple((n, _value(place, n, v)) for n, v in options.items())
    for name, _ in values:
        if name not in (*LEAF_OPTIONS, "compiler_options", "latencies"):
            _refuse(place, f"names an option '{name}', which fully_shard does not have")
    given: dict[str, Any] = {**texts, "state": tuple(state)}
    return TunedOptions(**given, options=values, place=place)


def _value(place: str, name: str, text: Any) -> Any:
    """The value of an option, which a file has as Python writes it."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError) as error:
        why = f"has {json.dumps(text)} for '{name}', which is no Python value in quotes"
        _refuse(place, f"{why}, such as {json.dumps(repr(text))}", error)


def _refuse(place: str, why: str, cause: Exception | None = None) -> NoReturn:
    raise ShardingError(
        f"options={place} is no file of tuned options: it {why}.\n"
        f"  fully_shard was called at {call_site()}\n"
        "Pass the path of a file that `python -m shardfn tune --out` wrote, or leave "
        "options= out."
    ) from cause
