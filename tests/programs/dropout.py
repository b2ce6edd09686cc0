"""In: where the random key lives. Out: steps that draw random numbers; the metrics
count the bits of every mask in integers, so that they are compared exactly.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from ._data import ROWS, tokens, vectors
from ._program import Program, register


class CountedDropout(nn.Module):
    """Dropout that sows how often each row and each column was kept."""

    rate: float

    @nn.compact
    def __call__(self, x):
        mask = nn.Dropout(self.rate, deterministic=False)(jnp.ones_like(x))
        kept = (mask > 0).astype(jnp.int32)
        self.sow("intermediates", "rows", kept.sum((1, 2)))
        self.sow("intermediates", "columns", kept.sum((0, 1)))
        return x * mask


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        h = nn.gelu(nn.Dense(45, use_bias=False)(nn.LayerNorm()(x)))
        h = CountedDropout(0.3)(h)
        return x + nn.Dense(36, use_bias=False)(h), None


class Model(nn.Module):
    scan: bool

    @nn.compact
    def __call__(self, ids):
        x = CountedDropout(0.1)(nn.Embed(101, 36)(ids))
        if self.scan:
            layers = nn.scan(
                nn.remat(Block, prevent_cse=False),
                variable_axes={"params": 0, "intermediates": 0},
                split_rngs={"params": True, "dropout": True},
                length=3,
            )
            x, _ = layers(name="layers")(x, None)
        else:
            x, _ = Block()(x, None)
        return nn.Dense(101, use_bias=False)(x)


def build(name: str, make_key, *, scan: bool, in_batch: bool, **kwargs) -> Program:
    """Trains `Model`; the key comes in the batch, or is split in the state."""
    model, tx = Model(scan), optax.adam(1e-3)

    def init(key):
        params_key, dropout_key = jax.random.split(key)
        rngs = {"params": params_key, "dropout": dropout_key}
        params = {"params": model.init(rngs, jnp.zeros((1, 7), jnp.int32))["params"]}
        state = {"params": params, "opt": tx.init(params)}
        return state if in_batch else state | {"key": make_key(3)}

    def train_step(state, batch):
        if in_batch:
            keys, key = {}, batch["key"]
        else:
            next_key, key = jax.random.split(state["key"])
            keys = {"key": next_key}

        def loss_fn(params):
            logits, sown = model.apply(
                params,
                batch["tokens"],
                rngs={"dropout": key},
                mutable=["intermediates"],
            )
            loss = optax.softmax_cross_entropy_with_integer_labels(
                logits, batch["labels"]
            )
            return loss.mean(), sown

        (loss, sown), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, opt = tx.update(grads, state["opt"])
        params = optax.apply_updates(state["params"], updates)
        state = {"params": params, "opt": opt, **keys}
        return state, {"loss": loss, "masks": sown["intermediates"]}

    def batch(seed):
        return tokens(seed) | ({"key": make_key(seed)} if in_batch else {})

    return Program(name, init, train_step, batch, **kwargs)


def raw_key(seed):
    """A key as uint32 words `[2]`, the form used before typed keys."""
    return jax.random.key_data(jax.random.key(seed))


@register("dropout_typed_key_in_state")
def dropout_typed_key_in_state() -> Program:
    name = "dropout_typed_key_in_state"
    return build(name, jax.random.key, scan=False, in_batch=False)


@register("dropout_typed_key_in_batch")
def dropout_typed_key_in_batch() -> Program:
    name = "dropout_typed_key_in_batch"
    return build(name, jax.random.key, scan=True, in_batch=True)


@register("dropout_raw_key_in_state")
def dropout_raw_key_in_state() -> Program:
    return build("dropout_raw_key_in_state", raw_key, scan=True, in_batch=False)


@register("dropout_raw_key_in_batch")
def dropout_raw_key_in_batch() -> Program:
    name, spec = "dropout_raw_key_in_batch", {"key": P()}
    return build(name, raw_key, scan=False, in_batch=True, batch_spec=spec)


@register("random_augment")
def random_augment() -> Program:
    """Noise, random integers, a key per row, and a shuffle of the rows."""

    def init(key):
        w_key, loop_key = jax.random.split(key)
        w = 0.3 * jax.random.normal(w_key, (17, 5))
        return {"w": w, "key": loop_key}

    def train_step(state, batch):
        key, *keys = jax.random.split(state["key"], 5)
        row_keys = jax.random.split(keys[0], ROWS)
        scale = jax.vmap(jax.random.uniform)(row_keys)
        noise = jax.random.normal(keys[1], batch["x"].shape)
        bucket = jax.random.randint(keys[2], (ROWS,), 0, 1000)
        order = jax.random.permutation(keys[3], ROWS)
        x = (batch["x"] + 0.1 * noise) * (1 + scale[:, None])
        y = batch["y"][order]

        def loss_fn(w):
            return ((x @ w - y) ** 2).mean()

        loss, grad = jax.value_and_grad(loss_fn)(state["w"])
        metrics = {"loss": loss, "bucket": bucket, "order": order}
        return {"w": state["w"] - 0.05 * grad, "key": key}, metrics

    def batch(seed):
        return vectors(seed, 17)

    return Program("random_augment", init, train_step, batch, gathers=True)
