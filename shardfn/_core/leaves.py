"""A leaf of an argument: its path, its type, and how automatic axes split it.

In: tree paths. Out: `Leaf`, and the names that people read.
"""

import os.path
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import keystr

from shardfn._core.automatic_axes import AutoSplit
from shardfn._core.memories import DEVICE
from shardfn._core.shown_limits import SHOWN_NAMES

Names = tuple[str, ...]
"""Names of the state leaves that a value belongs to: several if it joins them."""

NO_LEAF: Names = ()


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of an argument, on logical shapes.

    Attributes:
      path: its tree path.
      aval: its shape and dtype.
      auto: how it is split over automatic mesh axes; None if it does not say.
      memory: the memory that stores it.
    """

    path: tuple[Any, ...]
    aval: jax.ShapeDtypeStruct
    auto: AutoSplit | None = ()
    memory: str = DEVICE

    @property
    def name(self) -> str:
        return path_name(self.path)


def leaf_name(path: Sequence[Any]) -> str:
    """The name of a state leaf in patterns and plans."""
    return path_name(path) or "state"


def path_name(path: Sequence[Any]) -> str:
    """A tree path as people write it: `params/layers/kernel`."""
    return keystr(tuple(path), simple=True, separator="/")


def names_text(names: Sequence[str]) -> str:
    """`layers/{0, 1}/w` for two leaves, `layers/*/w` for many that differ in one place,
    "" for none."""
    paths = [name.split("/") for name in dict.fromkeys(names)]
    if len(paths) < 2:
        return "/".join(*paths) if paths else ""
    if len({len(path) for path in paths}) == 1:
        parts = [list(dict.fromkeys(part)) for part in zip(*paths, strict=True)]
        if sum(len(part) > 1 for part in parts) == 1:
            return "/".join("*" if len(p) > SHOWN_NAMES else _choice(p) for p in parts)
    start = os.path.commonprefix([path[:-1] for path in paths])
    return "/".join([*start, _choice(["/".join(p[len(start) :]) for p in paths])])


def _choice(parts: Sequence[str]) -> str:
    """`{a, b}`, or the one part there is."""
    shown = list(parts[:SHOWN_NAMES])
    if len(parts) > SHOWN_NAMES:
        shown.append(f"{len(parts) - SHOWN_NAMES} more")
    return "{" + ", ".join(shown) + "}" if len(shown) > 1 else shown[0]
