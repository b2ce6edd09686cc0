"""In: optax transformations. Out: one program each, over the same perceptron."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._data import vectors
from ._program import Program, register
from ._train import dense_params, squared_error, train


def _schedule() -> optax.Schedule:
    return optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 5, 1e-4)


OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(1e-2),
    "adamw_clip_warmup_cosine": lambda: optax.chain(
        optax.clip_by_global_norm(0.05), optax.adamw(_schedule(), weight_decay=0.1)
    ),
    "adamw_bf16_moment": lambda: optax.adamw(1e-3, mu_dtype=jnp.bfloat16),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "adafactor_momentum": lambda: optax.adafactor(
        1e-2, min_dim_size_to_factor=64, momentum=0.9, weight_decay_rate=1e-3
    ),
    "lamb": lambda: optax.lamb(1e-2, weight_decay=0.01),
    "lars": lambda: optax.lars(1e-2, weight_decay=0.01),
    "lion": lambda: optax.lion(1e-4),
    "rmsprop": lambda: optax.rmsprop(1e-3),
    "multi_steps": lambda: optax.MultiSteps(
        optax.adam(1e-2), every_k_schedule=2
    ).gradient_transformation(),
    "ema_of_updates": lambda: optax.chain(optax.sgd(0.1), optax.ema(0.9)),
    "adaptive_grad_clip": lambda: optax.chain(
        optax.adaptive_grad_clip(0.01), optax.sgd(0.1)
    ),
    "clip_by_block_rms": lambda: optax.chain(
        optax.clip_by_block_rms(1e-3), optax.adam(1e-2)
    ),
    "centralize": lambda: optax.chain(optax.centralize(), optax.sgd(0.1)),
    "novograd": lambda: optax.novograd(1e-2),
    "muon": lambda: optax.contrib.muon(1e-2),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(_schedule()),
}


def perceptron(key):
    """Widths that 8 does not divide, and one that it does."""
    return dense_params(key, 7, 40, 43, 5)


def _register(optimizer: str, make: Callable[[], optax.GradientTransformation]) -> None:
    name = f"opt_{optimizer}"
    tol = {"opt_adamw_bf16_moment": 1e-3}
    register(name)(
        lambda: train(
            name,
            perceptron,
            squared_error,
            make(),
            vectors,
            **({"tol": tol[name]} if name in tol else {}),
        )
    )


for _name, _make in OPTIMIZERS.items():
    _register(_name, _make)


@register("opt_apply_if_finite")
def opt_apply_if_finite() -> Program:
    """The third batch makes the gradients infinite; that update is not applied."""
    tx = optax.apply_if_finite(optax.adam(1e-2), max_consecutive_errors=3)

    def init(key):
        params = perceptron(key)
        return {"params": params, "opt": tx.init(params)}

    def train_step(state, batch):
        loss, grads = jax.value_and_grad(squared_error)(state["params"], batch)
        grads = jax.tree.map(lambda g: g * batch["scale"], grads)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, {"loss": loss, "ok": opt.last_finite}

    def batch(seed):
        scale = np.float32(np.inf if seed == 2 else 1.0)
        return vectors(seed) | {"scale": scale}

    return Program("opt_apply_if_finite", init, train_step, batch)


@register("opt_ema_of_params")
def opt_ema_of_params() -> Program:
    tx = optax.adam(1e-2)

    def init(key):
        params = perceptron(key)
        average = jax.tree.map(jnp.copy, params)
        return {"params": params, "average": average, "opt": tx.init(params)}

    def train_step(state, batch):
        loss, grads = jax.value_and_grad(squared_error)(state["params"], batch)
        updates, opt = tx.update(grads, state["opt"])
        params = optax.apply_updates(state["params"], updates)
        average = optax.incremental_update(params, state["average"], 0.01)
        metrics = {"loss": loss, "average_loss": squared_error(average, batch)}
        return {"params": params, "average": average, "opt": opt}, metrics

    return Program("opt_ema_of_params", init, train_step, vectors)


@register("opt_sam")
def opt_sam() -> Program:
    """Sharpness-aware minimisation: a second gradient at parameters moved uphill."""
    tx = optax.sgd(0.1)

    def init(key):
        params = perceptron(key)
        return {"params": params, "opt": tx.init(params)}

    def train_step(state, batch):
        params = state["params"]
        grads = jax.grad(squared_error)(params, batch)
        scale = 0.05 / (optax.tree.norm(grads) + 1e-12)
        uphill = jax.tree.map(lambda p, g: p + scale * g, params, grads)
        loss, grads = jax.value_and_grad(squared_error)(uphill, batch)
        updates, opt = tx.update(grads, state["opt"])
        params = optax.apply_updates(params, updates)
        return {"params": params, "opt": opt}, {"loss": loss}

    return Program("opt_sam", init, train_step, vectors)
