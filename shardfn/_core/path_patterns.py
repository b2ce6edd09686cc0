"""Patterns of the paths of a state's leaves, as options have them.

In: patterns and names of leaves. Out: which match, and what a pattern that matches none
may have been meant to be.
"""

import difflib
import fnmatch
from collections.abc import Collection, Iterable, Sequence

from shardfn._core.errors import listed, step_name
from shardfn._core.shown_limits import SHOWN_MATCHES


def matches(leaf: str, pattern: str) -> bool:
    """Whether `pattern` names the leaf, or a subtree that it lies in."""
    whole = fnmatch.fnmatchcase(leaf, pattern)
    return whole or fnmatch.fnmatchcase(leaf, f"{pattern}/*")


def first_match(patterns: Iterable[str], leaf: str) -> str | None:
    """The pattern that counts for a leaf."""
    return next((pattern for pattern in patterns if matches(leaf, pattern)), None)


def advice(pattern: str, names: Sequence[str], may_be: Collection[str] = ()) -> str:
    """Advice for a pattern that matches none of `names`: what was meant, if it can be
    known. One that begins with an argument of `may_be` may name leaves of that."""
    inner = {n.rsplit("/", i)[0] for n in names for i in range(1, n.count("/") + 1)}
    subtrees = [f"{name}/*" for name in sorted(inner)] if "*" in pattern else inner
    ends = [
        n for n in (*names, *sorted(inner)) if fnmatch.fnmatchcase(n, f"*/{pattern}")
    ]
    close = ends if len(ends) < 2 else [f"*/{pattern}"]
    close = close or difflib.get_close_matches(pattern, [*names, *sorted(subtrees)])
    meant = f"Did you mean {' or '.join(map(repr, close))}? " if close else ""
    argument = pattern.partition("/")[0]
    if argument in may_be:
        meant = (
            f"If argument '{argument}' of {step_name()} is a state of its own, say so "
            "with state_argnums=: leaves are then called after it from the start. "
        )
    return (
        f"{meant}The leaves are {listed(names, SHOWN_MATCHES)}. A pattern names "
        "leaves or subtrees; * stands for any characters."
    )
