"""Whether the arguments of `assert_parity` and `assert_same` are what they may be.

In: arguments as users write them. Out: nothing, or an error that says which is not.
"""

import difflib
from collections.abc import Mapping
from typing import Any

from shardfn._api.options import Options
from shardfn._api.validate import check_step
from shardfn._core.argument_values import (
    MAPPING,
    MESH,
    POSITIVE,
    REGEXES,
    TOLERANCE,
    check_arguments,
)
from shardfn._core.errors import call_site


def check_parity(
    step: Any, mesh: Any, steps: Any, tol: Any, ignore: Any, options: Mapping[str, Any]
) -> None:
    """Raises if an argument of `assert_parity` is not what it may be; `options` are
    checked by their names alone."""
    _check_names(options)
    check_step(step, "assert_parity")
    check_arguments(
        "assert_parity",
        mesh=(mesh, MESH),
        steps=(steps, POSITIVE),
        tol=(tol, TOLERANCE),
        ignore=(ignore, REGEXES),
    )


def check_same(tol: Any, ignore: Any, stored: Any) -> None:
    """Raises if an argument of `assert_same` is not what it may be."""
    check_arguments(
        "assert_same",
        tol=(tol, TOLERANCE),
        ignore=(ignore, REGEXES),
        stored=(stored, MAPPING.or_none()),
    )


def _check_names(options: Mapping[str, Any]) -> None:
    """Raises for a keyword that neither `assert_parity` nor `fully_shard` has."""
    own = ["steps", "tol", "ignore"]
    known = [*own, *Options.__annotations__]
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
            close = [k for k in own if name.startswith(k)] or close
            meant = f"Did you mean {close[0]}? " if close else ""
            raise TypeError(
                f"assert_parity has no argument {name!r}.\n"
                f"  assert_parity was called at {call_site()}\n"
                f"{meant}It takes {', '.join(own)} and the options of fully_shard."
            )
