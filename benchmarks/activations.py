"""What a model of `criteria.py` holds besides weights and gradients: one device's rows
forward and backward, compiled for a device that is not there. Weights are given whole
and narrow, and only norms have gradients, so nothing is gathered, cast or summed.
`goals.py` prints it.
"""

import criteria_programs as programs
import jax
import jax.numpy as jnp
from criteria_cases import Case
from criteria_models import mean_loss
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardfn.analysis import targets
from shardfn.analysis._heap_size import compiled_with_heap

ALONE = {"h100": "h100:1", "v5p": "tpu:v5p:2x2x1"}
"""The smallest target of a chip; several devices there compute the same."""


def temporary(case: Case, chip: str, platform: str) -> int:
    """Peak temporary bytes of a loss and its gradient by the scales of norms.

    Args:
      case: the case; of its batch, what one device takes.
      chip: a key of `ALONE`.
      platform: its platform, as JAX calls it.
    """
    whole = NamedSharding(targets.mesh(ALONE[chip]), P())
    state, batch = programs.arguments(case.model, 1)
    found, treedef = jax.tree_util.tree_flatten_with_path(state["params"])
    leaves = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for _, x in found]
    norms = ["norm" in jax.tree_util.keystr(path) for path, _ in found]
    split = [
        [x if norm is wanted else None for x, norm in zip(leaves, norms, strict=True)]
        for wanted in (True, False)
    ]

    def loss(scales, weights, batch):
        pairs = zip(scales, weights, strict=True)
        params = treedef.unflatten([w if s is None else s for s, w in pairs])
        return mean_loss(params, batch, case.model)

    step = jax.jit(jax.grad(loss), in_shardings=whole, out_shardings=whole)
    _, heap = compiled_with_heap(step.lower(*split, batch), platform, {})
    return heap
