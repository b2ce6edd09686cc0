"""A Llama with tensor parallelism over mesh axis `model`, fully sharded over `data`.

The state says how it is split over `model`: by heads and by columns of the MLP, as
Megatron does. That is all: XLA partitions the operations over `model`, and
`fully_shard` shards what one of its devices has over `data`. Shapes: Layers, Batch,
Time, Dimension, Heads, Key, Feed-forward, Vocabulary.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import shardfn

L, D, H, K, F, V = 2, 32, 4, 8, 64, 48
SPECS = {
    "embed": P("model"),
    "head": P(None, "model"),
    "q": P(None, None, "model"),
    "k": P(None, None, "model"),
    "v": P(None, None, "model"),
    "out": P(None, "model"),
    "gate": P(None, None, "model"),
    "up": P(None, None, "model"),
    "down": P(None, "model"),
}
SHAPES = {
    "embed": (V, D),
    "head": (D, V),
    **dict.fromkeys("qkv", (L, D, H * K)),
    "out": (L, H * K, D),
    "gate": (L, D, F),
    "up": (L, D, F),
    "down": (L, F, D),
}


def create_state(key, mesh):
    keys = dict(zip(SHAPES, jax.random.split(key, len(SHAPES)), strict=True))
    made = {
        name: jax.random.normal(keys[name], shape) / shape[-2] ** 0.5
        for name, shape in SHAPES.items()
    }
    of = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    params = lax.with_sharding_constraint(made, of)
    params |= {"scales": jnp.ones((L, 2, D)), "last_scale": jnp.ones(D)}
    return {"params": params, "momenta": jax.tree.map(jnp.zeros_like, params)}


def norm(x_BxTxD, scale):
    square = jnp.mean(x_BxTxD**2, axis=-1, keepdims=True)
    return x_BxTxD * lax.rsqrt(square + 1e-6) * scale


def rotate(x_BxTxHxK):
    T, half = x_BxTxHxK.shape[1], x_BxTxHxK.shape[-1] // 2
    rates = 1e4 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.outer(jnp.arange(T, dtype=jnp.float32), rates)[:, None]
    a, b = jnp.split(x_BxTxHxK, 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def attention(p, x_BxTxD):
    B, T, _ = x_BxTxD.shape
    q, k, v = ((x_BxTxD @ p[n]).reshape(B, T, H, K) for n in "qkv")
    scores = jnp.einsum("bthk,bshk->bhts", rotate(q), rotate(k)) / K**0.5
    scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -1e9)
    out = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores), v)
    return out.reshape(B, T, H * K) @ p["out"]


def logits(params, tokens_BxT):
    @jax.checkpoint
    def block(x, p):
        x += attention(p, norm(x, p["scales"][0]))
        h = norm(x, p["scales"][1])
        return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"], None

    names = "q", "k", "v", "out", "gate", "up", "down", "scales"
    layers = {name: params[name] for name in names}
    x_BxTxD, _ = lax.scan(block, params["embed"][tokens_BxT], layers)
    return norm(x_BxTxD, params["last_scale"]) @ params["head"]


def train_step(state, tokens):
    def loss_fn(params):
        scores = jax.nn.log_softmax(logits(params, tokens[:, :-1]))
        return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1))

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    momenta = jax.tree.map(lambda m, g: 0.9 * m + g, state["momenta"], grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momenta)
    return {"params": params, "momenta": momenta}, {"loss": loss}


def make_batch(key, rows=8, length=13):
    return jax.random.randint(key, (rows, length), 0, V)


def make_mesh():
    return jax.make_mesh((2, 4), ("data", "model"), (AxisType.Auto,) * 2)


def sharded(mesh):
    return shardfn.fully_shard(train_step, mesh, axis="data", min_size=64)


def main():
    mesh = make_mesh()
    step, batch = sharded(mesh), make_batch(jax.random.key(1))
    state = step.init(create_state, jax.random.key(0), mesh)
    print(step.plan(state, batch))
    print("up is split by", state["params"]["up"].sharding.spec)
    for i in range(5):
        state, metrics = step(state, batch)
        print(f"step {i}  loss {float(metrics['loss']):.4f}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # leave this out on accelerators
    main()
