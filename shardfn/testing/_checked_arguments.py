"""Whether the arguments of `assert_parity` and `assert_same` are what they may be.

In: arguments as users write them. Out: nothing, or an error that says which is not.
"""

from typing import Any

from shardfn._api.validate import check_step
from shardfn._core.argument_values import (
    MAPPING,
    MESH,
    POSITIVE,
    REGEXES,
    TOLERANCE,
    check_arguments,
)


def check_parity(step: Any, mesh: Any, steps: Any, tol: Any, ignore: Any) -> None:
    """Raises if an argument of `assert_parity` is not what it may be."""
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
