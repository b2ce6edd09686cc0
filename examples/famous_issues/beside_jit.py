"""In: a training step, unedited, and shapes of its arguments. Out: the step under `jit`
and through `fully_shard`, lowered for a mesh of devices that need not be there.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from beside import jitted
from jax.sharding import Mesh, PartitionSpec

import shardfn

Programs = dict[str, Callable[[], jax.stages.Lowered]]
"""By name; lowering may raise what `jit` or `fully_shard` has to say."""


def both(step: Callable[..., Any], mesh: Mesh, *args: Any, **options: Any) -> Programs:
    """`step` under `jit`, its state stored as `fully_shard` stores it, beside
    `fully_shard`; the state comes first, and is returned first."""
    rows = PartitionSpec(mesh.axis_names[0])
    sharded = shardfn.fully_shard(step, mesh, axis=mesh.axis_names[0], **options)
    spec = options.get("batch_spec", rows)
    return {
        "jit": lambda: jitted(step, sharded, args, spec),
        "shardfn": lambda: sharded.lower(*args),
    }


def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def descend(loss_fn: Callable[..., Any], params: Any, *batch: Any) -> Any:
    """A step of gradient descent: the new parameters, and the loss."""
    loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def mlp_layer(x: jax.Array, layer: dict[str, jax.Array]) -> jax.Array:
    up, down = (layer[name].astype(jnp.bfloat16) for name in ("up", "down"))
    return x + jnp.tanh(x @ up) @ down


def mlp_shapes(width: int, *stack: int) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        "up": shape(*stack, width, 4 * width),
        "down": shape(*stack, 4 * width, width),
    }
