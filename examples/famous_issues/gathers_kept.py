"""jax-ml/jax#25010 (November 2024): "How do you remat GSPMD inserted all-gathers?"

Each layer is under `jax.checkpoint`, so that its backward pass computes it anew. The
all-gathers of its weights are not in the step: XLA's partitioner adds them, once for
both passes, and every layer's whole weights stay in memory from one to the other.
shardfn gathers them in each pass, and keeps the compiler from merging the two.
"""

import jax
import jax.numpy as jnp
from beside_jit import Programs, both, descend, mlp_layer, mlp_shapes, shape
from jax.sharding import Mesh

TARGET, AXES = "h100:8", {"data": 8}
SIZE, SMALL = 8, 2
WIDTH, ROWS = 1024, 32768


def train_step(params, x):
    def loss_fn(params, x):
        for layer in params:
            x = jax.checkpoint(mlp_layer)(x, layer)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    return descend(loss_fn, params, x)


def arguments(layers: int, width: int = WIDTH, rows: int = ROWS):
    return [mlp_shapes(width)] * layers, shape(rows, width, dtype=jnp.bfloat16)


def programs(mesh: Mesh, size: int = SIZE) -> Programs:
    return both(train_step, mesh, *arguments(size))
