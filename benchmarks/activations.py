"""What the models of `criteria.py` hold besides weights and gradients: one device's
rows forward and backward, compiled for an H100 that is not there. Weights are given
whole and narrow, and only norms have gradients, so nothing is gathered, cast or summed.

Needs the extra `aot`.

    python benchmarks/activations.py
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import criteria_programs as programs
import jax
import jax.numpy as jnp
from criteria_cases import CASES, Case
from criteria_models import mean_loss
from criteria_table import markdown
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardfn.analysis import targets


def temporary(case: Case) -> int:
    """Peak temporary bytes of a loss and its gradient by the scales of norms."""
    one = NamedSharding(targets.mesh("h100:1"), P())
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

    step = jax.jit(jax.grad(loss), in_shardings=one, out_shardings=one)
    compiled = step.lower(*split, batch).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def main() -> None:
    lines = [
        (case.name, f"{temporary(case) / 2**30:.2f} GiB")
        for case in CASES.values()
        if 2 in case.criteria
    ]
    print(markdown(("case", "activations"), lines))


if __name__ == "__main__":
    main()
