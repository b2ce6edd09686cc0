"""A pipeline over mesh axis `stage`, each stage fully sharded over mesh axis `data`.

Stages are a dimension of arrays, split over `stage`, which is left to XLA: the stages
work at the same time, on microbatches that a roll hands on, and XLA makes a
collective-permute of it. `fully_shard` shards each stage's layers over `data`.
Shapes: Stages, Layers, Microbatches, Batch, Width.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardfn

LAYERS, WIDTH, MICROBATCHES = 3, 24, 4  # layers of one stage


def create_state(key, mesh):
    """The layers of all stages, and their momenta."""
    shape = (mesh.shape["stage"], LAYERS, WIDTH, WIDTH)
    kernels = jax.random.normal(key, shape) / WIDTH**0.5
    params = {"kernel": kernels, "bias": jnp.zeros(shape[:3])}
    of_stages = NamedSharding(mesh, P("stage"))
    params = lax.with_sharding_constraint(params, of_stages)
    return {"params": params, "momenta": jax.tree.map(jnp.zeros_like, params)}


def run_stage(params, x_BxW):
    def layer(x, p):
        return x + jnp.tanh(x @ p["kernel"] + p["bias"]), None

    return lax.scan(layer, x_BxW, params)[0]


def pipeline(params, x_MxBxW):
    """What the last stage makes of each microbatch. It leaves the last stage as many
    ticks after it has entered the first as there are stages before it."""
    stages = params["bias"].shape[0]

    def tick(out_SxBxW, x_BxW):
        arrived = jnp.roll(out_SxBxW, 1, axis=0)
        first = jnp.arange(stages)[:, None, None] == 0
        out_SxBxW = jax.vmap(run_stage)(params, jnp.where(first, x_BxW, arrived))
        return out_SxBxW, out_SxBxW[-1]

    idle = jnp.zeros((stages - 1, *x_MxBxW.shape[1:]))
    start = jnp.zeros((stages, *x_MxBxW.shape[1:]))
    _, out = lax.scan(tick, start, jnp.concatenate([x_MxBxW, idle]))
    return out[stages - 1 :]


def train_step(state, batch):
    def loss_fn(params):
        x, y = (v.reshape(-1, MICROBATCHES, WIDTH).swapaxes(0, 1) for v in batch)
        return jnp.mean((pipeline(params, x) - y) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    momenta = jax.tree.map(lambda m, g: 0.9 * m + g, state["momenta"], grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momenta)
    return {"params": params, "momenta": momenta}, {"loss": loss}


def make_batch(key, rows=8):
    x, y = jax.random.normal(key, (2, rows * MICROBATCHES, WIDTH))
    return x, jnp.sin(y)


def make_mesh():
    return jax.make_mesh((2, 4), ("stage", "data"), (AxisType.Auto,) * 2)


def sharded(mesh):
    return shardfn.fully_shard(train_step, mesh, axis="data", min_size=0)


def main():
    mesh = make_mesh()
    step, batch = sharded(mesh), make_batch(jax.random.key(1))
    state = step.init(create_state, jax.random.key(0), mesh)
    print(step.plan(state, batch))
    print(state["params"]["kernel"].sharding.spec)
    for i in range(5):
        state, metrics = step(state, batch)
        print(f"step {i}  loss {float(metrics['loss']):.4f}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # leave this out on accelerators
    main()
