"""What a step returns has to be arrays and numbers.

In: what it returns. Out: nothing; or an error that names what is not.
"""

from typing import Any

import jax
from jax.tree_util import tree_leaves_with_path

from shardfn._core.errors import ShardingError, called, step_name
from shardfn._core.leaves import path_name
from shardfn._core.shown_limits import SHOWN_VALUE


def check_values(out: Any) -> None:
    """Raises if a leaf of what a step returns is no array and no number."""
    for path, leaf in tree_leaves_with_path(out):
        try:
            jax.typeof(leaf)
        except TypeError:
            raise ShardingError(
                f"{step_name()} returns {path_name(path)} of type "
                f"{type(leaf).__name__}: {repr(leaf)[:SHOWN_VALUE]}.\n{called()}"
                "A compiled step returns arrays and numbers, as under jax.jit. Return "
                "what is none from around the step, or keep it in the state, where "
                "text and functions are static."
            ) from None
