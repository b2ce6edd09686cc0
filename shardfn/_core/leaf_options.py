"""What is asked of each leaf of the state: how it is gathered, kept and reduced.

In: options of `fully_shard`, each a value or a mapping from path patterns to values.
Out: a frozen `Control`, and from it one `LeafControl` per leaf.
"""

import difflib
import fnmatch
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NoReturn, TypeVar

import jax
import jax.numpy as jnp

from shardfn._core.errors import ShardingError, call_site, called, cannot_be, listed

T = TypeVar("T")

PerLeaf = T | Mapping[str, T]
"""A value for all leaves, or values by path pattern."""

Reshard = bool | int | Literal["auto"]
Accumulate = Literal["auto", "scatter", "defer"]

Choices = tuple[tuple[str, Any], ...]
"""Path patterns and what they choose, the first match first."""


@dataclass(frozen=True, slots=True)
class LeafControl:
    """What is asked of one leaf; see the arguments of `fully_shard`."""

    reshard_after_forward: Reshard = "auto"
    gather_dtype: str | None = None
    reduce_dtype: str | None = None
    accumulate: Accumulate = "auto"
    prefetch: int = 0
    bucket_bytes: int = 0
    shard: tuple[str, ...] | None = None
    per_device_state: bool = False


@dataclass(frozen=True, slots=True)
class Control:
    """What is asked of all leaves.

    Attributes:
      choices: `(option, ((pattern, value), ...))` for every option that differs from
        its default, in the order of `LeafControl`'s fields.
      place: the user's line that asked, for messages.
    """

    choices: tuple[tuple[str, Choices], ...] = ()
    place: str = field(default="", compare=False)
    # By path.
    known: dict[tuple[str, ...], LeafControl] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def of(self, *leaves: str) -> LeafControl:
        """What is asked of a value of these leaves: what is asked of all of them, where
        they differ the default; of no leaf what is asked of every one."""
        if leaves not in self.known:
            self.known[leaves] = _agreed([_of(self, leaf) for leaf in leaves or ("",)])
        return self.known[leaves]

    @property
    def has_per_device_state(self) -> bool:
        """Whether each device keeps some leaf for itself."""
        return bool(dict(self.choices).get("per_device_state"))

    @property
    def prefetches(self) -> bool:
        """Whether some leaf is to be gathered ahead."""
        return any(lead for _, lead in dict(self.choices).get("prefetch", ()))

    @property
    def joins(self) -> bool:
        """Whether some leaf may move together with others."""
        return any(size for _, size in dict(self.choices).get("bucket_bytes", ()))

    def check(self, leaves: Iterable[str]) -> None:
        """Raises if a pattern names none of the state's leaves, or only such as an
        earlier, wider one has taken with another value."""
        names = list(leaves)
        self._check_dtypes()
        for option, choices in self.choices:
            wider: list[tuple[str, Any, set[str]]] = []
            for pattern, value in choices:
                taken = {name for name in names if _matches(name, pattern)}
                if not taken:
                    raise ShardingError(
                        f"{option} names '{pattern}', which matches no leaf of the "
                        f"state.\n{called()}{self._given()}{_instead(pattern, names)}"
                    )
                for earlier, other, held in wider:
                    if held > taken and other != value:
                        raise ShardingError(
                            f"{option} names '{pattern}' after '{earlier}', which has "
                            f"all of its leaves: the first that matches counts.\n"
                            f"{called()}{self._given()}"
                            f"Name '{pattern}' first."
                        )
                wider.append((pattern, value, taken))

    def _check_dtypes(self) -> None:
        """Raises if JAX, as it is configured now, has no arrays of a dtype."""
        asked = dict(self.choices)
        for option in ("gather_dtype", "reduce_dtype"):
            for _, dtype in asked.get(option, ()):
                if dtype and jax.dtypes.canonicalize_dtype(dtype) != dtype:
                    raise ShardingError(
                        f"{option}={dtype!r} names a dtype that JAX does not have "
                        f"while jax_enable_x64 is off.\n{called()}{self._given()}"
                        'Turn it on, jax.config.update("jax_enable_x64", True), or '
                        "name 'float32'."
                    )

    def _given(self) -> str:
        return f"  fully_shard was called at {self.place}\n" if self.place else ""

    def on(self, axis: str, size: int) -> "Control":
        """The same on a mesh axis of `size` devices, which may keep parameters gathered
        within groups of some of them: of one is whole, of all is as stored."""
        groups = self.groups - {size}
        for smaller, larger in itertools.pairwise((1, *sorted(groups), size)):
            if larger % smaller or larger > size:
                wrong = smaller if larger == size else larger
                raise ShardingError(
                    f"reshard_after_forward={wrong} does not divide the {size} devices "
                    f"of mesh axis '{axis}' into groups.\n  at {call_site()}\n"
                    "Pass a number that divides it, such as the devices of one host; "
                    "of several numbers, each has to divide the next."
                )
        choices = {
            option: tuple(
                (p, v if type(v) is not int or v < size else True) for p, v in each
            )
            if option == "reshard_after_forward"
            else each
            for option, each in self.choices
        }
        return Control(tuple(choices.items()), self.place)

    @property
    def groups(self) -> set[int]:
        """Numbers of devices within which parameters are kept gathered."""
        asked = dict(self.choices).get("reshard_after_forward", ())
        return {value for _, value in asked if type(value) is int}

    def check_axes(self, names: Sequence[str]) -> None:
        """Raises if a leaf is to be sharded over something else than `names`."""
        for _, over in dict(self.choices).get("shard", ()):
            for name in over or ():
                if name not in names:
                    raise ShardingError(
                        f"shard={over} names mesh axis '{name}', but fully_shard was "
                        f"given axis={tuple(names)}.\n"
                        f"  fully_shard was called at {call_site()}\n"
                        "Shard the state over these axes, over some of them, or pass "
                        "more of the mesh's as axis."
                    )

    def __str__(self) -> str:
        lines = []
        for option, choices in self.choices:
            each = (f"{v!r}" + f" for {p}" * (p != "*") for p, v in choices)
            lines.append(f"{option}: {', '.join(each)}")
        return "\n".join(lines)


NOTHING_ASKED = Control()
"""Every option as it is by default."""


def make_control(**options: Any) -> Control:
    """A `Control` of options as users write them.

    Args:
      **options: fields of `LeafControl`, each a value or a mapping from path patterns
        to values.

    Returns:
      The control; equal for options that say the same.

    Raises:
      ShardingError: an option has no such value.
    """
    found = []
    for known in fields(LeafControl):
        given = options.pop(known.name, known.default)
        if known.name == "per_device_state":
            given = _patterns(known.name, given)
        named = given if isinstance(given, Mapping) else {"*": given}
        choices = tuple(
            (_pattern(known.name, pattern), _CHECKS[known.name](known.name, value))
            for pattern, value in named.items()
        )
        if any(value != known.default for _, value in choices):
            found.append((known.name, choices))
    if options:
        raise TypeError(f"unknown options {sorted(options)}")
    return Control(tuple(found), call_site() if found else "")


def _agreed(asked: Sequence[LeafControl]) -> LeafControl:
    """What all of these ask for, and the default where they differ."""
    names = [option.name for option in fields(LeafControl)]
    values = {name: [getattr(each, name) for each in asked] for name in names}
    same = {k: v[0] for k, v in values.items() if all(x == v[0] for x in v)}
    return LeafControl(**same)


def _of(control: Control, leaf: str) -> LeafControl:
    chosen: dict[str, Any] = {}
    for option, choices in control.choices:
        for pattern, value in choices:
            if _matches(leaf, pattern):
                chosen[option] = value
                break
    return LeafControl(**chosen)


def _instead(pattern: str, names: Sequence[str]) -> str:
    """Advice for a pattern that matches none of `names`: what was meant, if it can be
    told."""
    inner = {n.rsplit("/", i)[0] for n in names for i in range(1, n.count("/") + 1)}
    subtrees = [f"{name}/*" for name in sorted(inner)] if "*" in pattern else inner
    close = difflib.get_close_matches(pattern, [*names, *sorted(subtrees)])
    meant = f"Did you mean {' or '.join(map(repr, close))}? " if close else ""
    return (
        f"{meant}The leaves are {listed(names, 20)}. A pattern names leaves or "
        "subtrees; * stands for any characters."
    )


def _matches(leaf: str, pattern: str) -> bool:
    """Whether `pattern` names the leaf, or a subtree that it lies in."""
    whole = fnmatch.fnmatchcase(leaf, pattern)
    return whole or fnmatch.fnmatchcase(leaf, f"{pattern}/*")


def _one_of(*allowed: Any) -> Callable[[str, Any], Any]:
    def check(option: str, value: Any) -> Any:
        for known in allowed:
            if type(value) is type(known) and value == known:
                return value
        _refuse(option, value, ", ".join(map(repr, allowed)))

    return check


def _reshard(option: str, value: Any) -> Reshard:
    if isinstance(value, bool) or value == "auto":
        return value
    if type(value) is not int or value < 1:
        _refuse(option, value, "True, False, 'auto', a number of devices")
    return value if value > 1 else False  # 1 equals True, and says the contrary


def _floating(option: str, value: Any) -> str | None:
    if value is None:
        return None
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        _refuse(option, value, "None or a floating-point dtype such as 'bfloat16'")
    return str(dtype)


def _axes(option: str, value: Any) -> tuple[str, ...] | None:
    names = (value,) if isinstance(value, str) else value
    if names is None or names is False:
        return None if names is None else ()
    if not isinstance(names, tuple) or not all(isinstance(n, str) for n in names):
        _refuse(option, value, "a mesh axis, a tuple of mesh axes, False or None")
    return names


def _count(option: str, value: Any) -> int:
    if type(value) is not int or value < 0:
        _refuse(option, value, "an integer that is not negative")
    return value


def _patterns(option: str, given: Any) -> dict[str, bool]:
    """The leaves of an option that is a tuple of path patterns."""
    named = given or ()
    if isinstance(named, str) or not isinstance(named, Sequence):
        cannot_be(option, given, "Pass a tuple of path patterns: ('batch_stats/*',).")
    return {_pattern(option, pattern): True for pattern in named}


def _pattern(option: str, pattern: Any) -> str:
    if not isinstance(pattern, str):
        advice = "Pass a mapping from path patterns, which are strings, to values."
        cannot_be(f"a pattern of {option}", pattern, advice)
    return pattern


def _refuse(option: str, value: Any, allowed: str) -> NoReturn:
    cannot_be(
        option,
        value,
        f"Pass {allowed}, or a mapping from path patterns to such values, as in "
        f"{option}={{'params/layers/*': ...}}.",
    )


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "reshard_after_forward": _reshard,
    "gather_dtype": _floating,
    "reduce_dtype": _floating,
    "accumulate": _one_of("auto", "scatter", "defer"),
    "prefetch": _count,
    "bucket_bytes": _count,
    "shard": _axes,
    "per_device_state": lambda option, value: value,
}
