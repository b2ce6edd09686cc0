"""Variables of flax.nnx that several modules share, as tied weights are.

In: a state. Out: nothing, or an error that names them: in a pytree of arrays, as JAX
makes one of modules, each would become several.
"""

from typing import Any

import jax

from shardfn._core.errors import ShardingError, called
from shardfn._core.optional import flax_nnx


def shared(tree: Any) -> list[str]:
    """The places of a variable, or of a module that has some, which is in a pytree more
    than once; empty if there is none."""
    nnx = flax_nnx()
    if nnx is None or not _has_modules(tree):
        return []
    each = nnx.split(tree, graph=True)[1]
    if len(jax.tree.leaves(each)) == len(jax.tree.leaves(tree)):
        return []
    found = nnx.find_duplicates(tree)  # none where arrays lie beside modules
    return ["/".join(map(str, path)) for path in found[0]] if found else []


def refuse_shared(states: tuple[Any, ...]) -> None:
    """Raises if states have modules that share variables."""
    if places := shared(states[0] if len(states) == 1 else states):
        raise ShardingError(
            f"'{places[0]}' and '{places[1]}' of the state are one variable or module "
            "of flax.nnx, and would come back as two: a pytree does not share its "
            f"leaves.\n{called()}"
            "Take nnx.state(modules) as the state, which has each variable once, or "
            "pass the modules as arguments to a step that updates them in place and "
            "returns only metrics (see From flax.nnx)."
        )


def _has_modules(tree: Any) -> bool:
    nnx: Any = flax_nnx()
    found = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.Pytree))
    return any(isinstance(x, nnx.Pytree) for x in found)
