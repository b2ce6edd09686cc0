"""What a model of `criteria.py` holds besides weights and gradients: one device's rows
forward and backward, compiled for a device that is not there. Weights are given whole
and narrow, and their gradients are results, so nothing is gathered, cast or summed.
`goals.py` prints it.
"""

import criteria_programs as programs
import jax
import jax.numpy as jnp
from criteria_cases import Case
from criteria_models import mean_loss
from jax.sharding import NamedSharding, PartitionSpec as P

from shardfn._lowering.xla_options import compiler_options
from shardfn.analysis import targets
from shardfn.analysis._heap_size import compiled_with_heap

ALONE = {"h100": "h100:1", "v5p": "tpu:v5p:2x2x1"}
"""The smallest target of a chip; several devices there compute the same."""


def temporary(case: Case, chip: str, platform: str) -> int:
    """Peak temporary bytes of a loss and its gradient.

    Args:
      case: the case; of its batch, what one device takes.
      chip: a key of `ALONE`.
      platform: its platform, as JAX calls it.
    """
    whole = NamedSharding(targets.mesh(ALONE[chip]), P())
    state, batch = programs.arguments(case.model, 1)
    weights = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), state["params"]
    )

    def loss(params, batch):
        return mean_loss(params, batch, case.model)

    step = jax.jit(jax.grad(loss), in_shardings=whole, out_shardings=whole)
    # GPUs' as steps of this library are compiled with. Those for TPUs are of transfers.
    devices = targets.devices(ALONE[chip])
    options = compiler_options(devices, None) if platform == "gpu" else {}
    _, heap = compiled_with_heap(step.lower(weights, batch), platform, options)
    return heap
