"""marin-community/levanter#429 (January 2024, open, now marin#1934): "FSDP with an odd/
weird number of GPUs".

`jit` takes no argument whose split dimension the devices do not divide, and refuses;
what is left is to store such leaves whole. shardfn pads what is stored, where nobody
sees it: not in `unshard`, not in norms, not in checkpoints.
"""

import jax
import jax.numpy as jnp
from beside_jit import Programs, both, descend, shape
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

TARGET, AXES = "h100:1x1x5", {"data": 5}
SIZE, SMALL = 4096, 256


def train_step(params, x):
    def loss_fn(params, x):
        for weight in params:
            x = jnp.tanh(x @ weight.astype(jnp.bfloat16))
        return jnp.mean(x.astype(jnp.float32) ** 2)

    return descend(loss_fn, params, x)


def arguments(width: int, rows: int = 20480):
    weights = [shape(1024, width), shape(width, 1024)]
    return weights, shape(rows, 1024, dtype=jnp.bfloat16)


def programs(mesh: Mesh, size: int = SIZE) -> Programs:
    args = arguments(size)
    found = both(train_step, mesh, *args, min_size=0)
    split = NamedSharding(mesh, P("data"))
    asked = jax.jit(train_step, in_shardings=(split, split))
    return {
        "jit, split": lambda: asked.lower(*args),
        "jit, whole": found["jit"],
        "shardfn": found["shardfn"],
    }
