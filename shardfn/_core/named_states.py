"""States that are called as the step calls its arguments.

In: the names of state arguments, and their trees. Out: a pytree whose leaves are called
after both: `opt_state/mu/kernel`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True, slots=True)
class StateKey:
    """The key of a state argument: it is called as the step calls it.

    Attributes:
      name: what the step calls it.
      is_part: whether the step has states that are not there.
    """

    name: str
    is_part: bool = False

    def __str__(self) -> str:
        return self.name


@jax.tree_util.register_pytree_with_keys_class
class NamedStates(tuple[Any, ...]):
    """State arguments of a step that has several, whose leaves are called after them.

    Attributes:
      names: what the step calls them.
      is_part: whether the step has states that are not among them.
    """

    names: tuple[str, ...]
    is_part: bool

    def __new__(
        cls, names: Sequence[str], values: Sequence[Any], is_part: bool = False
    ) -> "NamedStates":
        made = super().__new__(cls, values)
        made.names, made.is_part = tuple(names), is_part
        return made

    def tree_flatten_with_keys(self) -> tuple[list[Any], tuple[Any, ...]]:
        """The arguments in order."""
        keys = (StateKey(name, self.is_part) for name in self.names)
        return list(zip(keys, self, strict=True)), (self.names, self.is_part)

    @classmethod
    def tree_unflatten(
        cls, form: tuple[Any, ...], values: Sequence[Any]
    ) -> "NamedStates":
        names, is_part = form
        return cls(names, tuple(values), is_part)


def lies_in_part(path: Sequence[Any]) -> bool:
    """Whether a leaf lies in a state beside which the step has others."""
    return bool(path) and isinstance(path[0], StateKey) and path[0].is_part
