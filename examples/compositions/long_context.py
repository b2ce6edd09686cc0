"""Long context: a batch that is split by rows over `data` and by time over `context`.

The step is written for one device. Where attention meets keys and values of other
parts of the sequence, these are gathered over `context`. Parameters are sharded over
`context`, the last of the two axes, and gradients are summed over both. Shapes: Batch,
Time, Dimension, Heads, Key, Vocabulary.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import shardfn

L, D, H, K, V = 2, 32, 4, 8, 48


def create_state(key):
    shapes = {"qkv": (L, D, 3 * H * K), "out": (L, H * K, D)}
    shapes |= {"up": (L, D, 4 * D), "down": (L, 4 * D, D)}
    shapes |= {"embed": (V, D), "head": (D, V)}
    keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
    params = {
        name: jax.random.normal(keys[name], shape) / shape[-2] ** 0.5
        for name, shape in shapes.items()
    }
    return {"params": params, "momenta": jax.tree.map(jnp.zeros_like, params)}


def attention(p, x_BxTxD):
    B, T, _ = x_BxTxD.shape
    q, k, v = jnp.split((x_BxTxD @ p["qkv"]).reshape(B, T, H, 3 * K), 3, axis=-1)
    scores = jnp.einsum("bthk,bshk->bhts", q, k) / K**0.5
    seen = jnp.arange(T)[:, None] >= jnp.arange(T)
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e9))
    out = jnp.einsum("bhts,bshk->bthk", weights, v)
    return out.reshape(B, T, H * K) @ p["out"]


def normed(x):
    return x * lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def logits(params, tokens_BxT):
    @jax.checkpoint
    def block(x, p):
        x += attention(p, normed(x))
        return x + jax.nn.gelu(normed(x) @ p["up"]) @ p["down"], None

    layers = {name: params[name] for name in ("qkv", "out", "up", "down")}
    x_BxTxD, _ = lax.scan(block, params["embed"][tokens_BxT], layers)
    return normed(x_BxTxD) @ params["head"]


def train_step(state, batch):
    """The targets are an array of their own: a shift by one of tokens that are split by
    time would exchange one of each part."""

    def loss_fn(params):
        scores = jax.nn.log_softmax(logits(params, batch["tokens"]))
        return -jnp.mean(jnp.take_along_axis(scores, batch["targets"][..., None], -1))

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    momenta = jax.tree.map(lambda m, g: 0.9 * m + g, state["momenta"], grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momenta)
    return {"params": params, "momenta": momenta}, {"loss": loss}


def make_batch(key, rows=4, length=32):
    tokens = jax.random.randint(key, (rows, length + 1), 0, V)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def make_mesh():
    return jax.make_mesh((2, 4), ("data", "context"), (AxisType.Auto,) * 2)


def sharded(mesh):
    return shardfn.fully_shard(
        train_step,
        mesh,
        axis=("data", "context"),
        batch_spec=P("data", "context"),
        min_size=64,
        stationary=False,
    )


def main():
    mesh = make_mesh()
    step, batch = sharded(mesh), make_batch(jax.random.key(1))
    state = step.init(create_state, jax.random.key(0))
    print(step.plan(state, batch))
    print("up is split by", state["params"]["up"].sharding.spec)
    for i in range(5):
        state, metrics = step(state, batch)
        print(f"step {i}  loss {float(metrics['loss']):.4f}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # leave this out on accelerators
    main()
