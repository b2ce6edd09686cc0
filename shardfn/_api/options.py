"""The options of `fully_shard`, as its signature and its docstring spell them.

In: the function with its own options, and the table of those that may differ from leaf
to leaf. Out: the same function, which shows every option, and says of a misspelled one
which it may be.
"""

import difflib
import functools
import inspect
import os
import textwrap
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from shardfn._api.predicted_latencies import Latencies
from shardfn._core.errors import ShardingError, call_site
from shardfn._core.leaf_options import LEAF_OPTIONS, LeafOptions
from shardfn._core.shown_limits import DOC_WIDTH
from shardfn._lowering.xla_options import Asked

Made = TypeVar("Made", bound=Callable[..., Any])

PLACEHOLDER = "  **leaf_options: "
"""The line of the docstring, and those indented below, that the table replaces."""


class Options(LeafOptions, total=False):
    """The options of `fully_shard`; its docstring says what they are."""

    axis: str | tuple[str, ...]
    min_size: int
    strict: bool
    state_argnums: int | tuple[int, ...] | Literal["auto"]
    batch_spec: Any
    donate: bool
    verify: str
    compiler_options: Asked
    latencies: Latencies | None
    options: str | os.PathLike[str] | None
    shard_for: tuple[Any, ...] | None


def shows_options(transform: Made) -> Made:
    """Makes `fully_shard` show the table's options, and refuse unknown ones."""

    @functools.wraps(transform)
    def with_options(*args: Any, **options: Any) -> Any:
        for option in options:
            if option not in known:
                close = difflib.get_close_matches(option, known, n=1)
                advice = f"Its options are {', '.join(known[1:])}."
                if close:
                    advice = f"Did you mean {close[0]}=...? {advice}"
                raise ShardingError(
                    f"fully_shard has no option '{option}'.\n"
                    f"  fully_shard was called at {call_site()}\n{advice}"
                )
        return transform(*args, **options)

    signature = _signature(transform)
    known = list(signature.parameters)
    with_options.__signature__ = signature  # pyright: ignore
    with_options.__doc__ = _docstring(transform.__doc__)
    return with_options  # pyright: ignore[reportReturnType]


def _signature(transform: Callable[..., Any]) -> inspect.Signature:
    """The signature with a parameter per row in the place of `**leaf_options`."""
    signature = inspect.signature(transform)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    rows = [
        inspect.Parameter(
            option.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=option.default_given,
            annotation=option.type,
        )
        for option in LEAF_OPTIONS.values()
    ]
    return signature.replace(parameters=[*own, *rows])


def _docstring(doc: str | None) -> str | None:
    """The docstring with an entry per row in the place of that of `**leaf_options`."""
    if doc is None:  # python -OO
        return None
    lines = inspect.cleandoc(doc).split("\n")
    start = next(i for i, line in enumerate(lines) if line.startswith(PLACEHOLDER))
    end = next(i for i, line in enumerate(lines) if i > start and not line.strip())
    entries = (
        textwrap.wrap(
            f"{option.name}: {option.text}",
            DOC_WIDTH,
            initial_indent="  ",
            subsequent_indent="    ",
            break_on_hyphens=False,
            break_long_words=False,
        )
        for option in LEAF_OPTIONS.values()
    )
    return "\n".join([*lines[:start], *sum(entries, []), *lines[end:]])
