"""What is asked of each leaf of the state: how it is gathered, kept and reduced.

In: options of `fully_shard`, each a value or a mapping from path patterns to values.
Out: a frozen `Control`, and from it one `LeafControl` per leaf.
"""

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import jax

from shardfn._core.errors import ShardingError, call_site, called, cannot_be
from shardfn._core.leaf_options import LEAF_OPTIONS, LeafOptions
from shardfn._core.option_values import Option, StoredAxis, gives_axes
from shardfn._core.path_patterns import advice, first_match, matches
from shardfn._core.quantized import is_quantized
from shardfn._core.sharding import Axes

Choices = tuple[tuple[str, Any], ...]
"""Path patterns and what they choose, the first match first."""


if TYPE_CHECKING:

    class LeafControl:
        """What is asked of one leaf: an attribute for each row of `LeafOptions`."""

        def __init__(self, **chosen: Any) -> None: ...
        def __getattr__(self, option: str) -> Any: ...

else:
    LeafControl = make_dataclass(
        "LeafControl",
        [(name, Any, option.default) for name, option in LEAF_OPTIONS.items()],
        namespace={"__doc__": "What is asked of one leaf."},
        frozen=True,
        slots=True,
    )


@dataclass(frozen=True, slots=True)
class Control:
    """What is asked of all leaves.

    Attributes:
      choices: `(option, ((pattern, value), ...))` for every option that differs from
        its default, in the order of the table.
      place: the user's line that asked, for messages.
      by_axis: options that were given as a mapping from mesh axes, for all leaves.
      loop_bytes: what loops may hold whole, if it is more than limits.LOOP_BYTES: what
        planning found, not the user.
    """

    choices: tuple[tuple[str, Choices], ...] = ()
    place: str = field(default="", compare=False)
    by_axis: tuple[str, ...] = field(default=(), compare=False)
    loop_bytes: int = 0
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

    def asked(self, option: str) -> tuple[Any, ...]:
        """What is asked of some leaves by one option; nothing if it is as by
        default."""
        return tuple(value for _, value in dict(self.choices).get(option, ()))

    @property
    def patterns(self) -> set[str]:
        """The path patterns of all options."""
        return {pattern for _, choices in self.choices for pattern, _ in choices}

    @property
    def quantizes_gathers(self) -> bool:
        """Whether it is asked of some leaf that it be gathered quantized."""
        asked = self.asked("gather_dtype")
        return any(isinstance(each, tuple) or is_quantized(each) for each in asked)

    def is_named(self, option: str, leaves: Sequence[str]) -> bool:
        """Whether one option names each of these leaves, by its whole path."""
        patterns = [pattern for pattern, _ in dict(self.choices).get(option, ())]
        named = (first_match(patterns, leaf) == leaf for leaf in leaves)
        return bool(leaves) and all(named)

    @property
    def given(self) -> LeafOptions:
        """The options as users could have written them."""
        given: Any = {}
        for option, choices in self.choices:
            of_patterns = LEAF_OPTIONS[option].values.are_patterns
            patterns = tuple(p for p, _ in choices)
            given[option] = patterns if of_patterns else dict(choices)
        return given

    def check(
        self,
        leaves: Iterable[str],
        is_part: bool = False,
        may_be: Collection[str] = (),
    ) -> None:
        """Raises if a pattern names none of the state's leaves, or only such as an
        earlier, wider one has taken with another value.

        Args:
          leaves: names of the leaves.
          is_part: whether the step has other states, whose leaves a pattern may name.
          may_be: arguments that may be states, too, for errors.
        """
        names = list(leaves)
        self._check_dtypes()
        self._check_axes_and(names)
        for option, choices in self.choices:
            wider: list[tuple[str, Any, set[str]]] = []
            for pattern, value in choices:
                taken = {name for name in names if matches(name, pattern)}
                if not taken and is_part:
                    continue
                if not taken:
                    meant = advice(pattern, names, may_be)
                    raise ShardingError(
                        f"{option} names '{pattern}', which matches no leaf of the "
                        f"state.\n{called()}{self._given()}{meant}"
                    )
                for earlier, other, matched in wider:
                    if matched > taken and other != value:
                        raise ShardingError(
                            f"{option} names '{pattern}' after '{earlier}', which has "
                            f"all of its leaves: the first that matches counts.\n"
                            f"{called()}{self._given()}"
                            f"Name '{pattern}' first."
                        )
                wider.append((pattern, value, taken))

    def _check_axes_and(self, leaves: Sequence[str]) -> None:
        """Raises if what was taken for a mesh axis names a leaf, too."""
        choices = dict(self.choices)
        for option in self.by_axis:
            for axis, dtype in (pair for _, value in choices[option] for pair in value):
                if any(matches(leaf, axis) for leaf in leaves):
                    raise ShardingError(
                        f"{option} names '{axis}', which is a mesh axis and a leaf, or "
                        f"subtree, of the state.\n{called()}{self._given()}"
                        f"Write {{'*': {{'{axis}': '{dtype}'}}}} for the mesh axis, or "
                        f"{{'{axis}*': '{dtype}'}} for what is stored under this name."
                    )

    def _check_dtypes(self) -> None:
        """Raises if JAX, as it is configured now, has no arrays of a dtype."""
        for option in DTYPES_OF_MOVES:
            for dtype in self.asked(option):
                if (
                    isinstance(dtype, str)
                    and jax.dtypes.canonicalize_dtype(dtype) != dtype
                ):
                    raise ShardingError(
                        f"{option}={dtype!r} names a dtype that JAX does not have "
                        f"while jax_enable_x64 is off.\n{called()}{self._given()}"
                        'Turn it on, jax.config.update("jax_enable_x64", True), or '
                        "name 'float32'."
                    )

    def _given(self) -> str:
        return f"  fully_shard was called at {self.place}\n" if self.place else ""

    def on(self, axes: Axes) -> "Control":
        """The same on these mesh axes, of which one may be divided into groups that
        have parameters gathered: groups of one are whole, of all are as stored."""
        axis, size = axes.names[axes.divided], axes.sizes[axes.divided]
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
        return replace(self, choices=tuple(choices.items()))

    @property
    def groups(self) -> set[int]:
        """Numbers of devices within which parameters are kept gathered."""
        asked = self.asked("reshard_after_forward")
        return {value for value in asked if type(value) is int}

    def check_axes(self, names: Sequence[str]) -> None:
        """Raises if an option names other mesh axes than `names`."""
        for option in ("shard", *DTYPES_OF_MOVES):
            for value in self.asked(option):
                for name in map(axis_of, value if isinstance(value, tuple) else ()):
                    if name not in names:
                        self._refuse_axis(option, value, name, names)

    def _refuse_axis(
        self, option: str, value: Any, name: str, names: Sequence[str]
    ) -> NoReturn:
        shown = LEAF_OPTIONS[option].values.show(value)
        raise ShardingError(
            f"{option}={shown} names mesh axis '{name}', but fully_shard was given "
            f"axis={tuple(names)}.\n"
            f"  fully_shard was called at {call_site()}\n"
            "Name these axes, some of them, or pass more of the mesh's as axis."
        )

    def __str__(self) -> str:
        lines = []
        for option, choices in self.choices:
            show = LEAF_OPTIONS[option].values.show
            each = (show(v) + f" for {p}" * (p != "*") for p, v in choices)
            lines.append(f"{option}: {', '.join(each)}")
        return "\n".join(lines)


DTYPES_OF_MOVES = ("gather_dtype", "reduce_dtype")
"""Options whose values may be dtypes by mesh axis."""

NOTHING_ASKED = Control()
"""Every option as it is by default."""


def make_control(mesh_axes: Sequence[str] = (), **options: Any) -> Control:
    """A `Control` of options as users write them.

    Args:
      mesh_axes: names of the mesh axes, to which a mapping may give dtypes.
      **options: those of `LeafOptions`.

    Returns:
      The control; equal for options that say the same.

    Raises:
      ShardingError: an option has no such value.
    """
    found, by_axis = [], []
    for name, option in LEAF_OPTIONS.items():
        given = options.pop(name, option.default_given)
        if name in DTYPES_OF_MOVES and gives_axes(given, mesh_axes):
            given = {"*": given}
            by_axis.append(name)
        choices = tuple(
            (_pattern(name, pattern), option.values.of(_asked(name, pattern), value))
            for pattern, value in _by_pattern(option, given).items()
        )
        if any(value != option.default for _, value in choices):
            found.append((name, choices))
    if options:
        raise TypeError(f"unknown options {sorted(options)}")
    return Control(tuple(found), call_site() if found else "", tuple(by_axis))


def _agreed(asked: Sequence[LeafControl]) -> LeafControl:
    """What all of these ask for, and the default where they differ."""
    values = {name: [getattr(each, name) for each in asked] for name in LEAF_OPTIONS}
    same = {k: v[0] for k, v in values.items() if all(x == v[0] for x in v)}
    return LeafControl(**same)


def _of(control: Control, leaf: str) -> LeafControl:
    chosen: dict[str, Any] = {}
    for option, choices in control.choices:
        pattern = first_match((p for p, _ in choices), leaf)
        if pattern is not None:
            chosen[option] = dict(choices)[pattern]
    return LeafControl(**chosen)


def axis_of(entry: StoredAxis) -> str:
    """The mesh axis of an entry of `shard`."""
    return entry if isinstance(entry, str) else entry[0]


def _by_pattern(option: Option, given: Any) -> Mapping[str, Any]:
    """What users pass as values by path pattern."""
    if not option.values.are_patterns:
        return given if isinstance(given, Mapping) else {"*": given}
    named = given or ()
    if isinstance(named, str) or not isinstance(named, Sequence):
        option.values.refuse(option.name, given)
    return {_pattern(option.name, pattern): True for pattern in named}


def _asked(option: str, pattern: Any) -> str:
    """How messages name what is asked of the leaves of a pattern."""
    return option if pattern == "*" else f"{option}[{pattern!r}]"


def _pattern(option: str, pattern: Any) -> str:
    if not isinstance(pattern, str):
        text = "Pass a mapping from path patterns, which are strings, to values."
        cannot_be(f"a pattern of {option}", pattern, text)
    return pattern
