"""A leaf of an argument: its path, its type, and how automatic axes split it.

In: tree paths. Out: `Leaf`, and the names that people read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import keystr

from shardfn._core.automatic_axes import AutoSplit


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of an argument, on logical shapes.

    Attributes:
      path: its tree path.
      aval: its shape and dtype.
      auto: how it is split over automatic mesh axes; None if it does not say.
    """

    path: tuple[Any, ...]
    aval: jax.ShapeDtypeStruct
    auto: AutoSplit | None = ()

    @property
    def name(self) -> str:
        return path_name(self.path)


def leaf_name(path: Sequence[Any]) -> str:
    """The name of a state leaf in patterns and plans."""
    return path_name(path) or "state"


def path_name(path: Sequence[Any]) -> str:
    """A tree path as people write it: `params/layers/kernel`."""
    return keystr(tuple(path), simple=True, separator="/")
