"""Physical-Intelligence/openpi#112 (December 2024, merged): "code for fsdp".

PaliGemma's vocabulary of 257152 rows is split over 4 GPUs, and a step takes 512 x 48
tokens. XLA warns that it rematerializes the whole table, 2 GiB, and the step is slower
than its authors expect. This is that table, with layers of an MLP under a scan and a
head in the place of the model. Looked up where it lies, only the rows that were asked
for travel.
"""

import jax
import jax.numpy as jnp
from beside_jit import Programs, both, descend, mlp_layer, mlp_shapes, shape
from jax.sharding import Mesh

TARGET, AXES = "h100:4", {"data": 4}
SIZE, SMALL = 257152, 8192
WIDTH, LAYERS, ROWS = 2048, 4, 512


def train_step(params, tokens):
    def loss_fn(params, tokens):
        x = params["table"][tokens].astype(jnp.bfloat16)
        layer = jax.checkpoint(lambda x, layer: (mlp_layer(x, layer), None))
        x, _ = jax.lax.scan(layer, x, params["layers"])
        out = x.mean(axis=1) @ params["head"].astype(jnp.bfloat16)
        return jnp.mean(out.astype(jnp.float32) ** 2)

    return descend(loss_fn, params, tokens)


def arguments(vocabulary: int, width: int = WIDTH, rows: int = ROWS):
    params = {
        "table": shape(vocabulary, width),
        "layers": mlp_shapes(width, LAYERS),
        "head": shape(width, 32),
    }
    return params, shape(rows, 48, dtype=jnp.int32)


def programs(mesh: Mesh, size: int = SIZE) -> Programs:
    return both(train_step, mesh, *arguments(size))
