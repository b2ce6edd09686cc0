"""In: nothing. Out: transformers that are not decoders alone: masked tokens, an encoder
with a decoder, image patches; relative positions within a window.
"""

import jax
import jax.numpy as jnp
import optax

from ._data import ROWS, images, tokens
from ._program import Program, register
from ._train import (
    attention,
    attention_params,
    cross_entropy,
    dense_apply,
    dense_params,
    layer_norm,
    normal_params,
    train,
)

VOCAB, WIDTH, HEADS, HEAD, LENGTH = 101, 36, 3, 8, 7


def block_params(key):
    a, b = jax.random.split(key)
    return {
        "attention": attention_params(a, WIDTH, HEADS, HEAD),
        "dense": dense_params(b, WIDTH, 43, WIDTH),
    }


def block_apply(params, x, **options):
    h = layer_norm(x)
    x = x + attention(params["attention"], h, h, **options)
    return x + dense_apply(params["dense"], layer_norm(x))


@register("masked_lm")
def masked_lm() -> Program:
    """An encoder that predicts hidden tokens: a key in the state hides them, lengths
    in the batch end the rows, and the mean is over what is hidden."""
    tx = optax.adam(1e-2)

    def init(key):
        a, b, loop_key = jax.random.split(key, 3)
        params = normal_params(a, table=(VOCAB + 1, WIDTH), place=(LENGTH, WIDTH))
        params["block"] = block_params(b)
        return {"params": params, "opt": tx.init(params), "key": loop_key}

    def train_step(state, batch):
        key, hide_key = jax.random.split(state["key"])
        ids = batch["tokens"]
        real = jnp.arange(LENGTH) < batch["length"][:, None]
        hidden = jax.random.bernoulli(hide_key, 0.3, ids.shape) & real

        def loss_fn(params):
            x = params["table"][jnp.where(hidden, VOCAB, ids)] + params["place"]
            mask = (real[:, :, None] & real[:, None, :])[:, None]
            x = block_apply(params["block"], x, mask=mask | jnp.eye(LENGTH, dtype=bool))
            logits = layer_norm(x) @ params["table"][:VOCAB].T
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, ids)
            return (losses * hidden).sum() / jnp.maximum(hidden.sum(), 1)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"])
        params = optax.apply_updates(state["params"], updates)
        metrics = {"loss": loss, "hidden": hidden.sum()}
        return {"params": params, "opt": opt, "key": key}, metrics

    def batch(seed):
        ids = tokens(seed)["tokens"]
        return {"tokens": ids, "length": 1 + ids[:, 0] % LENGTH}

    return Program("masked_lm", init, train_step, batch)


@register("encoder_decoder")
def encoder_decoder() -> Program:
    """Cross attention to an encoded source of another length; smoothed labels."""

    def init_params(key):
        keys = jax.random.split(key, 4)
        return {
            **normal_params(keys[0], table=(VOCAB, WIDTH)),
            "encoder": block_params(keys[1]),
            "decoder": block_params(keys[2]),
            "cross": attention_params(keys[3], WIDTH, HEADS, HEAD),
        }

    def loss_fn(params, batch):
        source = block_apply(params["encoder"], params["table"][batch["source"]])
        x = params["table"][batch["tokens"]]
        x = block_apply(params["decoder"], x, is_causal=True)
        x = x + attention(params["cross"], layer_norm(x), source)
        logits = layer_norm(x) @ params["table"].T
        targets = optax.smooth_labels(jax.nn.one_hot(batch["labels"], VOCAB), 0.1)
        return optax.softmax_cross_entropy(logits, targets).mean()

    def batch(seed):
        return tokens(seed, 5) | {"source": tokens(seed + 100)["tokens"]}

    tx = optax.sgd(0.02)
    return train("encoder_decoder", init_params, loss_fn, tx, batch)


@register("vision_transformer")
def vision_transformer() -> Program:
    """Patches by reshape and transpose, a class token in front of them."""

    def init_params(key):
        keys = jax.random.split(key, 3)
        shapes = dict(patch=(48, WIDTH), place=(5, WIDTH), token=(1, 1, WIDTH))
        return {
            **normal_params(keys[0], **shapes),
            "block": block_params(keys[1]),
            "head": dense_params(keys[2], WIDTH, 7),
        }

    def loss_fn(params, batch):
        x = batch["image"].reshape(ROWS, 2, 4, 2, 4, 3).swapaxes(2, 3)
        x = x.reshape(ROWS, 4, 48) @ params["patch"]
        token = jnp.broadcast_to(params["token"], (ROWS, 1, WIDTH))
        x = jnp.concatenate((token, x), axis=1) + params["place"]
        x = block_apply(params["block"], x)
        return cross_entropy(dense_apply(params["head"], x[:, 0]), batch["label"])

    name, tx = "vision_transformer", optax.adamw(1e-3)
    return train(name, init_params, loss_fn, tx, images)


@register("relative_positions")
def relative_positions() -> Program:
    """A learned bias per distance, looked up in buckets; attention within a window."""
    distance = jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH)
    bucket = jnp.minimum(jnp.log2(jnp.abs(distance) + 1).astype(int), 2)
    bucket = bucket + 3 * (distance > 0)

    def init_params(key):
        a, b = jax.random.split(key)
        params = normal_params(a, table=(VOCAB, WIDTH), bias=(6, HEADS))
        return params | {"block": block_params(b)}

    def loss_fn(params, batch):
        bias = params["bias"][bucket].transpose(2, 0, 1)[None]
        x = params["table"][batch["tokens"]]
        options = dict(bias=bias, is_causal=True, local_window_size=(3, 0))
        x = block_apply(params["block"], x, **options)
        return cross_entropy(layer_norm(x) @ params["table"].T, batch["labels"])

    tx = optax.adam(1e-2)
    return train("relative_positions", init_params, loss_fn, tx, tokens)
