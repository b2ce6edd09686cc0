"""jax-ml/jax#20763 (April 2024, open): "Latency Hiding Scheduler leads to x5 memory
usage if used without jax.lax.scan".

Layers of two kinds, three with an MLP and one with experts, cannot be one scan, and are
called one by one. The scheduler that overlaps transfers with matmuls, which is on, then
has many gathers to start early. The report is of 300 billion parameters on more than
1000 H100s, 50 GB that became 200 to 250; this is its pattern at a size that compiles in
seconds. What grows with the layers under `jit` is gathered weights.
"""

import jax
import jax.numpy as jnp
from beside_jit import Programs, both, descend, mlp_layer, mlp_shapes, shape
from jax.sharding import Mesh

TARGET, AXES = "h100:8", {"data": 8}
SIZE, SMALL = 4, 1
WIDTH, ROWS, EXPERTS = 1024, 16384, 8


def expert_layer(x, layer):
    gate, up, down = (layer[k].astype(jnp.bfloat16) for k in ("gate", "up", "down"))
    share = jax.nn.softmax((x @ gate).astype(jnp.float32)).astype(jnp.bfloat16)
    hidden = jnp.tanh(jnp.einsum("bw,ewh->beh", x, up))
    return x + jnp.einsum("beh,ehw,be->bw", hidden, down, share)


def train_step(params, x):
    def loss_fn(params, x):
        for layer in params:
            kind = expert_layer if "gate" in layer else mlp_layer
            x = jax.checkpoint(kind)(x, layer)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    return descend(loss_fn, params, x)


def arguments(repeats: int, width: int = WIDTH, rows: int = ROWS):
    experts = {
        "gate": shape(width, EXPERTS),
        "up": shape(EXPERTS, width, 2 * width),
        "down": shape(EXPERTS, 2 * width, width),
    }
    layers = [*[mlp_shapes(width)] * 3, experts] * repeats
    return layers, shape(rows, width, dtype=jnp.bfloat16)


def programs(mesh: Mesh, size: int = SIZE) -> Programs:
    return both(train_step, mesh, *arguments(size))
