"""A pipeline over mesh axis `stage`, each stage fully sharded over mesh axis `data`.

The step is written as pipelines are in JAX: a `jax.shard_map` over `stage`, in it a
scan over ticks, and a `ppermute` that hands a microbatch to the next stage. `stage` is
left to XLA; `fully_shard` shards each stage's layers over `data`, inside.
Shapes: Layers, Microbatches, Batch, Width.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

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


def in_order(params, x_MxBxW):
    """What one device makes of each microbatch: one stage after the other."""
    stages = range(params["bias"].shape[0])
    for stage in stages:
        own = jax.tree.map(lambda p, stage=stage: p[stage], params)
        x_MxBxW = jax.vmap(functools.partial(run_stage, own))(x_MxBxW)
    return x_MxBxW


def pipeline(params, x_MxBxW):
    """What the last stage makes of each microbatch, on every stage. It leaves the last
    stage as many ticks after it has entered the first as there are stages before it."""
    params = jax.tree.map(lambda p: p[0], params)
    stage, stages = lax.axis_index("stage"), lax.axis_size("stage")
    to_the_next = [(i, i + 1) for i in range(stages - 1)]

    def tick(arrived_BxW, x_BxW):
        out_BxW = run_stage(params, jnp.where(stage == 0, x_BxW, arrived_BxW))
        return lax.ppermute(out_BxW, "stage", to_the_next), out_BxW

    idle = jnp.zeros((stages - 1, *x_MxBxW.shape[1:]))
    nothing = lax.pcast(jnp.zeros(x_MxBxW.shape[1:]), "stage", to="varying")
    _, out = lax.scan(tick, nothing, jnp.concatenate([x_MxBxW, idle]))
    return lax.psum(jnp.where(stage == stages - 1, out[stages - 1 :], 0), "stage")


def train_step(state, batch, run=in_order):
    def loss_fn(params):
        x, y = (v.reshape(-1, MICROBATCHES, WIDTH).swapaxes(0, 1) for v in batch)
        return jnp.mean((run(params, x) - y) ** 2)

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
    specs = dict(in_specs=(P("stage"), P()), out_specs=P(), axis_names={"stage"})
    in_stages = jax.shard_map(pipeline, mesh=mesh, **specs)
    step = functools.partial(train_step, run=in_stages)
    return shardfn.fully_shard(step, mesh, axis="data", min_size=0)


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
