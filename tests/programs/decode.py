"""In: nothing. Out: steps that train nothing: an evaluation, and sampling with a cache
of keys and values. The parameters come back as they went in.
"""

import jax
import jax.numpy as jnp
import optax

from ._data import ROWS, tokens
from ._program import Program, register
from ._train import dense_apply, dense_params, layer_norm, normal_params

VOCAB, WIDTH, HEADS, HEAD, LENGTH = 101, 36, 3, 8, 6


def init(key):
    a, b, c = jax.random.split(key, 3)

    def layer(key):
        a, b = jax.random.split(key)
        into = (WIDTH, HEADS, HEAD)
        weights = normal_params(a, q=into, k=into, v=into, o=(HEADS, HEAD, WIDTH))
        return weights | {"dense": dense_params(b, WIDTH, 43, WIDTH)}

    layers = jax.vmap(layer)(jax.random.split(b, 2))
    return normal_params(a, table=(VOCAB, WIDTH)) | {"layers": layers}


def next_logits(params, cache, ids, t):
    """Logits after the `t`-th tokens `ids [B]`, and the cache with their keys and
    values `[layer, 2, B, LENGTH, heads, head]`."""

    def layer(x, inputs):
        weights, cache = inputs
        h = layer_norm(x)
        q, k, v = (jnp.einsum("bd,dhk->bhk", h, weights[name]) for name in "qkv")
        cache = jax.lax.dynamic_update_slice_in_dim(
            cache, jnp.stack((k, v))[:, :, None], t, axis=2
        )
        scores = jnp.einsum("bhk,bthk->bht", q, cache[0]) / HEAD**0.5
        scores = jnp.where(jnp.arange(LENGTH) <= t, scores, -1e9)
        mixed = jnp.einsum("bht,bthk->bhk", jax.nn.softmax(scores), cache[1])
        x = x + jnp.einsum("bhk,hkd->bd", mixed, weights["o"])
        return x + dense_apply(weights["dense"], layer_norm(x)), cache

    x, cache = jax.lax.scan(layer, params["table"][ids], (params["layers"], cache))
    return layer_norm(x) @ params["table"].T, cache


def empty_cache():
    return jnp.zeros((2, 2, ROWS, LENGTH, HEADS, HEAD))


@register("evaluation")
def evaluation() -> Program:
    """Losses and hits per token, one token at a time, through the cache."""

    def eval_step(params, batch):
        def one(cache, inputs):
            ids, labels, t = inputs
            logits, cache = next_logits(params, cache, ids, t)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return cache, (losses, logits.argmax(-1) == labels)

        xs = batch["tokens"].T, batch["labels"].T, jnp.arange(LENGTH)
        _, (losses, hits) = jax.lax.scan(one, empty_cache(), xs)
        return params, {"loss": losses.mean(), "hits": hits.sum(), "rows": losses.T}

    return Program("evaluation", init, eval_step, lambda seed: tokens(seed, LENGTH))


@register("sampling")
def sampling() -> Program:
    """Samples rows from their first tokens, until all have ended or are full."""

    def sample_step(params, batch):
        def one(carry):
            t, cache, ids, ended, total = carry
            logits, cache = next_logits(params, cache, ids[:, t], t)
            key = jax.random.fold_in(batch["key"], t)
            drawn = jax.random.categorical(key, logits)
            drawn = jnp.where(ended, 0, drawn)
            ids = jax.lax.dynamic_update_index_in_dim(ids, drawn, t + 1, axis=1)
            log_p = jax.nn.log_softmax(logits)
            picked = jnp.take_along_axis(log_p, drawn[:, None], axis=1)[:, 0]
            total = total + jnp.where(ended, 0.0, picked)
            return t + 1, cache, ids, ended | (drawn % 7 == 0), total

        def unfinished(carry):
            return (carry[0] < LENGTH - 1) & ~carry[3].all()

        ids = jnp.zeros((ROWS, LENGTH), jnp.int32).at[:, 0].set(batch["tokens"][:, 0])
        start = 0, empty_cache(), ids, jnp.zeros(ROWS, bool), jnp.zeros(ROWS)
        t, _, ids, _, total = jax.lax.while_loop(unfinished, one, start)
        return params, {"loss": total.mean(), "ids": ids, "steps": t}

    def batch(seed):
        return {"tokens": tokens(seed)["tokens"], "key": jax.random.key(seed)}

    return Program("sampling", init, sample_step, batch)
