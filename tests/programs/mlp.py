"""In: nothing. Out: multilayer perceptrons: plain pytrees, flax with a TrainState,
embeddings, and parameters that are frozen in three ways.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from ._data import tokens, vectors
from ._program import Program, register
from ._train import dense_apply, dense_params, squared_error, train


@register("mlp_pytree_sgd")
def mlp_pytree_sgd() -> Program:
    """The state is the list of parameters itself."""

    def init(key):
        return [(p["w"], p["b"]) for p in dense_params(key, 7, 36, 163, 5)]

    def train_step(state, batch):
        def loss_fn(params):
            x = batch["x"]
            for w, b in params[:-1]:
                x = jax.nn.relu(x @ w + b)
            w, b = params[-1]
            return ((x @ w + b - batch["y"]) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state)
        state = jax.tree.map(lambda p, g: p - 0.1 * g, state, grads)
        return state, {"loss": loss}

    return Program("mlp_pytree_sgd", init, train_step, vectors)


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm()(nn.Dense(36)(x))
        x = nn.swish(nn.Dense(163)(x))
        return nn.Dense(5)(x)


@register("mlp_flax_adam")
def mlp_flax_adam() -> Program:
    model, tx = Mlp(), optax.adam(1e-3)

    def init(key):
        params = model.init(key, jnp.zeros((1, 7)))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def train_step(state, batch):
        def loss_fn(params):
            predicted = state.apply_fn({"params": params}, batch["x"])
            return optax.huber_loss(predicted, batch["y"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    return Program("mlp_flax_adam", init, train_step, vectors)


def tagger_params(key):
    """An embedding table `[101, 16]`, a trunk and a head."""
    table_key, trunk_key = jax.random.split(key)
    table = jax.random.normal(table_key, (101, 16))
    return {"table": table, "dense": dense_params(trunk_key, 16, 36, 101)}


def tagger_loss(params, batch):
    """Predicts each label from its own token."""
    logits = dense_apply(params["dense"], params["table"][batch["tokens"]])
    labels = batch["labels"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def labels_of(params):
    """`"frozen"` for the table, `"trained"` for the rest."""
    dense = jax.tree.map(lambda _: "trained", params["dense"])
    return {"table": "frozen", "dense": dense}


@register("embedding_adam")
def embedding_adam() -> Program:
    tx = optax.adam(1e-2)
    return train("embedding_adam", tagger_params, tagger_loss, tx, tokens)


@register("frozen_multi_transform")
def frozen_multi_transform() -> Program:
    rules = {"trained": optax.adam(1e-2), "frozen": optax.set_to_zero()}
    tx = optax.multi_transform(rules, labels_of)
    return train("frozen_multi_transform", tagger_params, tagger_loss, tx, tokens)


@register("frozen_masked")
def frozen_masked() -> Program:
    def mask(params, wanted="trained"):
        return jax.tree.map(lambda label: label == wanted, labels_of(params))

    tx = optax.chain(
        optax.masked(optax.adam(1e-2), mask),
        optax.masked(optax.set_to_zero(), lambda p: mask(p, "frozen")),
    )
    return train("frozen_masked", tagger_params, tagger_loss, tx, tokens)


@register("frozen_stop_gradient")
def frozen_stop_gradient() -> Program:
    """The frozen table is outside what is differentiated, and leaves as it came."""

    def init(key):
        params = tagger_params(key)
        return {"table": params["table"], "trained": {"dense": params["dense"]}}

    def train_step(state, batch):
        def loss_fn(trained):
            table = jax.lax.stop_gradient(state["table"])
            return tagger_loss({"table": table, **trained}, batch)

        loss, grads = jax.value_and_grad(loss_fn)(state["trained"])
        trained = jax.tree.map(lambda p, g: p - 0.5 * g, state["trained"], grads)
        return {"table": state["table"], "trained": trained}, {"loss": loss}

    return Program("frozen_stop_gradient", init, train_step, tokens)


@register("mlp_weights_shared")
def mlp_weights_shared() -> Program:
    """One matrix used forwards and transposed: two gradients meet in one leaf."""

    def init_params(key):
        return dense_params(key, 7, 36, 7)

    def loss_fn(params, batch):
        encoder, decoder = params
        code = jnp.tanh(batch["x"] @ encoder["w"] + encoder["b"])
        out = code @ encoder["w"].T + code @ decoder["w"] + decoder["b"]
        return ((out - batch["x"]) ** 2).mean()

    tx = optax.adam(1e-2)
    return train("mlp_weights_shared", init_params, loss_fn, tx, vectors)


@register("mlp_l2_and_spectral_penalty")
def mlp_l2_and_spectral_penalty() -> Program:
    """Losses that read the parameters and no batch: norms, and a power iteration."""

    def loss_fn(params, batch):
        penalty = sum(jnp.sum(p**2) for p in jax.tree.leaves(params))
        w = params[1]["w"]

        def power(_, v):
            v = w.T @ (w @ v)
            return v / jnp.linalg.norm(v)

        v = jax.lax.fori_loop(0, 4, power, jnp.ones(w.shape[1]))
        sigma = jnp.linalg.norm(w @ jax.lax.stop_gradient(v))
        return squared_error(params, batch) + 1e-3 * penalty + 1e-2 * sigma

    def init_params(key):
        return dense_params(key, 7, 36, 43, 5)

    tx = optax.sgd(0.05, momentum=0.9)
    return train("mlp_l2_and_spectral_penalty", init_params, loss_fn, tx, vectors)
