"""Libraries that shardfn knows and does not need.

In: nothing. Out: the library, if the program uses it. Nothing is imported here: whoever
has an object of a library has imported it, and nobody else needs it.
"""

import sys
from types import ModuleType


def in_use(*names: str) -> list[ModuleType]:
    """Those of some libraries that the program has imported."""
    return [found for name in names if (found := sys.modules.get(name)) is not None]


def equinox() -> ModuleType | None:
    """`equinox`, or None where it is not in use."""
    return sys.modules.get("equinox")


def flax_nnx() -> ModuleType | None:
    """`flax.nnx`, or None where it is not in use."""
    return sys.modules.get("flax.nnx")
