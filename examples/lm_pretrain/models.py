"""A model of either family as two pure functions, which is all that a step sees."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from config import ModelConfig
from flax import nnx
from gpt import GPT
from llama import Llama

Params = Any
Batch = dict[str, jax.Array]


class Model(NamedTuple):
    """`init` makes parameters from a key; `apply` makes logits [B, T, V] from
    parameters, a batch and a key for dropout (None: no dropout)."""

    init: Callable[[jax.Array], Params]
    apply: Callable[[Params, Batch, jax.Array | None], jax.Array]


@functools.cache  # equal configs give the same functions: they are static in a state
def make_model(config: ModelConfig) -> Model:
    return linen_gpt(config) if config.family == "gpt" else nnx_llama(config)


def linen_gpt(config: ModelConfig) -> Model:
    gpt = GPT(config)

    def init(key: jax.Array) -> Params:
        tokens_1xT = jnp.zeros((1, config.context), jnp.int32)
        return gpt.init(key, tokens_1xT, tokens_1xT, tokens_1xT)["params"]

    def apply(params: Params, batch: Batch, key: jax.Array | None) -> jax.Array:
        return gpt.apply(
            {"params": params},
            *(batch["inputs"], batch["segments"], batch["positions"]),
            train=key is not None,
            rngs=None if key is None else {"dropout": key},
        )

    return Model(init, apply)


def nnx_llama(config: ModelConfig) -> Model:
    def init(key: jax.Array) -> Params:
        return nnx.to_pure_dict(nnx.state(Llama(config, nnx.Rngs(key)), nnx.Param))

    def apply(params: Params, batch: Batch, key: jax.Array | None) -> jax.Array:
        llama = merge_llama(config, params)
        return llama(batch["inputs"], batch["segments"], batch["positions"])

    return Model(init, apply)


@functools.cache
def abstract_llama(config: ModelConfig) -> tuple[nnx.GraphDef, nnx.State]:
    llama = nnx.eval_shape(lambda: Llama(config, nnx.Rngs(0)))
    graphdef, params, _ = nnx.split(llama, nnx.Param, ...)
    return graphdef, params


def merge_llama(config: ModelConfig, params: Params) -> Llama:
    """Returns the module around parameters, for calls inside of a pure function."""
    graphdef, state = abstract_llama(config)
    state = jax.tree.map(lambda x: x, state)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graphdef, state)


def count_parameters(config: ModelConfig) -> int:
    shapes = jax.eval_shape(make_model(config).init, jax.random.key(0))
    return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))
