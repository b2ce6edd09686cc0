"""Numbers in the place of leaves, in the user's own containers.

In: a structure and a number for each of its leaves. Out: the containers with objects
that hold the numbers: a container may make arrays of plain numbers, such as brax's
`UInt64`, and keeps what it does not know as it is.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True, slots=True)
class _Number:
    value: int


def with_numbers(treedef: Any, numbers: Iterable[int]) -> Any:
    """The containers of `treedef`, each leaf an object that holds its number."""
    return jax.tree.unflatten(treedef, map(_Number, numbers))


def numbers_in(tree: Any) -> list[int]:
    """The numbers of the leaves of such containers, or of a part of them, in order."""
    return [leaf.value for leaf in jax.tree.leaves(tree)]
