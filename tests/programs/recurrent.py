"""In: nothing. Out: recurrent networks and other loops over time."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from ._data import tokens, vectors
from ._program import Program, register
from ._train import cross_entropy, normal_params, train


class Lstm(nn.Module):
    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(101, 12)(ids)
        return nn.Dense(101)(nn.RNN(nn.OptimizedLSTMCell(20))(x))


@register("lstm")
def lstm() -> Program:
    model = Lstm()

    def init_params(key):
        return model.init(key, jnp.zeros((1, 7), jnp.int32))

    def loss_fn(params, batch):
        logits, labels = model.apply(params, batch["tokens"]), batch["labels"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    return train("lstm", init_params, loss_fn, tx, tokens)


@register("scan_elman")
def scan_elman() -> Program:
    """`lax.scan` over time in reverse, weights as closed-over constants."""

    def init_params(key):
        keys = jax.random.split(key, 3)
        shapes = {"in": (7, 19), "loop": (19, 19), "out": (19, 5)}
        return {
            name: 0.3 * jax.random.normal(k, shape)
            for k, (name, shape) in zip(keys, shapes.items(), strict=True)
        }

    def loss_fn(params, batch):
        x_TxBxD = jnp.stack([batch["x"] * scale for scale in (1.0, 0.5, -1.0)])

        def cell(h, x):
            h = jnp.tanh(x @ params["in"] + h @ params["loop"])
            return h, h @ params["out"]

        start = jnp.zeros((batch["x"].shape[0], 19))
        _, y_TxBxE = jax.lax.scan(cell, start, x_TxBxD, reverse=True)
        return ((y_TxBxE - batch["y"]) ** 2).mean()

    return train("scan_elman", init_params, loss_fn, optax.adam(1e-2), vectors)


@register("loops_and_branches")
def loops_and_branches() -> Program:
    """`while_loop`, `cond` and `switch` in the step, on data and on the step count."""

    def init(key):
        w = 0.3 * jax.random.normal(key, (7, 36))
        return {"w": w, "v": jnp.ones((36, 5)) * 0.1, "step": jnp.int32(0)}

    def train_step(state, batch):
        step = state["step"]

        def loss_fn(weights):
            w, v = weights
            h = batch["x"] @ w
            h = jax.lax.switch(step % 3, (jnp.tanh, jax.nn.relu, lambda h: h), h)
            return ((h @ v - batch["y"]) ** 2).mean()

        weights = (state["w"], state["v"])
        loss, grads = jax.value_and_grad(loss_fn)(weights)

        def too_long(carry):
            rate, _ = carry
            moved = jax.tree.map(lambda p, g: p - rate * g, weights, grads)
            return (loss_fn(moved) > loss) & (rate > 1e-6)

        rate, tries = jax.lax.while_loop(
            too_long, lambda c: (c[0] / 2, c[1] + 1), (jnp.float32(4.0), jnp.int32(0))
        )
        w, v = jax.lax.cond(
            step % 2 == 0,
            lambda: jax.tree.map(lambda p, g: p - rate * g, weights, grads),
            lambda: jax.tree.map(lambda p, g: 0.99 * p - 0.01 * g, weights, grads),
        )
        metrics = {"loss": loss, "rate": rate, "tries": tries}
        return {"w": w, "v": v, "step": step + 1}, metrics

    return Program("loops_and_branches", init, train_step, vectors)


@register("gru_sequences")
def gru_sequences() -> Program:
    """A GRU reads a source, another writes the target and looks back at the states of
    the first."""
    width = 12

    def init_params(key):
        gates = (2 * width, 3 * width)
        shapes = dict(table=(101, width), read=gates, write=gates)
        return normal_params(key, **shapes, out=(2 * width, 101))

    def gru(w, h, x):
        reset, keep, _ = jnp.split(jnp.concatenate((h, x), -1) @ w, 3, axis=-1)
        reset, keep = jax.nn.sigmoid(reset), jax.nn.sigmoid(keep)
        new = jnp.concatenate((reset * h, x), -1) @ w[:, -width:]
        return keep * h + (1 - keep) * jnp.tanh(new)

    def loss_fn(params, batch):
        source, x = (params["table"][batch[name].T] for name in ("source", "tokens"))

        def read(h, x):
            h = gru(params["read"], h, x)
            return h, h

        def write(h, x):
            h = gru(params["write"], h, x)
            weights = jax.nn.softmax(jnp.einsum("bd,sbd->bs", h, seen))
            looked = jnp.einsum("bs,sbd->bd", weights, seen)
            return h, jnp.concatenate((h, looked), -1) @ params["out"]

        h, seen = jax.lax.scan(read, jnp.zeros(x.shape[1:]), source)
        _, logits = jax.lax.scan(write, h, x)
        return cross_entropy(logits, batch["labels"].T)

    def batch(seed):
        return tokens(seed, 5) | {"source": tokens(seed + 100)["tokens"]}

    tx = optax.adam(1e-2)
    return train("gru_sequences", init_params, loss_fn, tx, batch)
