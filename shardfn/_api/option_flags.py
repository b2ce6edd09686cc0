"""The flags of the command line for options that may differ from leaf to leaf.

In: the table of these options, and texts as users type them. Out: a dataclass of a
command with a flag per row, and the options that its flags give.
"""

import ast
from dataclasses import field, make_dataclass
from typing import Annotated, Any

import tyro

from shardfn._core.leaf_options import LEAF_OPTIONS
from shardfn._core.option_values import Option


def with_flags(command: type) -> type:
    """The dataclass `command` with a flag for every row of the table."""
    flags = [
        (name, Annotated[tuple[str, ...], _shown(option)], field(default=()))
        for name, option in LEAF_OPTIONS.items()
    ]
    namespace = {"__doc__": command.__doc__}
    return make_dataclass(
        command.__name__, flags, bases=(command,), namespace=namespace, frozen=True
    )


def given_options(command: Any) -> dict[str, Any]:
    """The options that a command's flags give, as `fully_shard` takes them."""
    flags = {name: getattr(command, name, ()) for name in LEAF_OPTIONS}
    return {
        name: _given(LEAF_OPTIONS[name], texts)
        for name, texts in flags.items()
        if texts
    }


def _shown(option: Option) -> Any:
    metavar = "PATTERN" if option.values.are_patterns else "VALUE|PATTERN=VALUE"
    text = f"{option.summary}: {option.values.allowed}."
    hint = "(default: as the step says)"
    return tyro.conf.arg(metavar=f"[{metavar} ...]", help=text, help_behavior_hint=hint)


def _given(option: Option, texts: tuple[str, ...]) -> Any:
    """`3`, or `params/head=False *=True`."""
    if option.values.are_patterns:
        return texts
    pairs = [text.rpartition("=") for text in texts]
    if not any(equals for _, equals, _ in pairs) and len(pairs) == 1:
        return _value(texts[0])
    return {pattern or "*": _value(value) for pattern, _, value in pairs}


def _value(text: str) -> Any:
    """A Python literal, or the text itself."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
