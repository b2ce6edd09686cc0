"""In: a loss and an optax transformation. Out: the program that most people write:
`value_and_grad`, `tx.update`, `apply_updates`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from ._program import Program, Tree


def train(
    name: str,
    init_params: Callable[[jax.Array], Tree],
    loss_fn: Callable[[Tree, Tree], jax.Array],
    tx: optax.GradientTransformation,
    batch: Callable[[int], Tree],
    **kwargs,
) -> Program:
    """The program that minimises `loss_fn(params, batch)` with `tx`."""

    def init(key):
        params = init_params(key)
        return {"params": params, "opt": tx.init(params), "step": jnp.int32(0)}

    def train_step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        state = {"params": params, "opt": opt, "step": state["step"] + 1}
        return state, {"loss": loss, "grad_norm": optax.tree.norm(grads)}

    return Program(name, init, train_step, batch, **kwargs)


def dense_params(key: jax.Array, *widths: int) -> list[dict]:
    """A list of `{"w": [m, n], "b": [n]}`, one per pair of neighbouring widths."""
    keys = jax.random.split(key, len(widths) - 1)

    def layer(key, m, n):
        w = jax.random.normal(key, (m, n)) / m**0.5
        return {"w": w, "b": jnp.full(n, 0.1, jnp.float32)}

    return [layer(*args) for args in zip(keys, widths[:-1], widths[1:], strict=True)]


def dense_apply(params: list[dict], x: jax.Array) -> jax.Array:
    """`tanh` between the layers, none after the last."""
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def squared_error(params: list[dict], batch: dict) -> jax.Array:
    """The mean squared error of `dense_apply` over rows and outputs."""
    return ((dense_apply(params, batch["x"]) - batch["y"]) ** 2).mean()
