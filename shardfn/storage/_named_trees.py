"""Trees as the states of a step that they are, with the names that plans have.

In: the state arguments of a step, what is asked of leaves, and a tree. Out: states with
the same leaves in the same order.
"""

from typing import Any

import jax

from shardfn._core.control import Control
from shardfn._core.state_names import Argument, StateNames
from shardfn.storage._leaves import leaves_of


def states_of(
    tree: Any,
    names: StateNames,
    control: Control,
    argument: Argument | None = None,
    is_stored: bool = False,
) -> tuple[Any, ...]:
    """A tree as the states that it is.

    Args:
      tree: a state argument, or a tuple or dictionary of them, whole or stored.
      names: the state arguments of the step.
      control: what is asked of leaves by their names.
      argument: what the user says that the tree is.
      is_stored: whether it is one that the step has stored.

    Returns:
      A tuple of states; of a step that has several they have their names.
    """
    leaves, _ = leaves_of((tree,), "state")
    paths, shapes = [x.path for x in leaves], [x.aval.shape for x in leaves]
    given = jax.tree.structure(tree), paths, shapes, control, argument, is_stored
    return names.reading(*given).states(tree)
