"""In: a layer, and whether layers are scanned and rematerialised. Out: the loss of a
stack of such layers in bfloat16; one such stack, its shapes and a step that trains it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

KINDS = ["scan", "scan_remat", "unrolled", "unrolled_remat"]
LAYERS, WIDTH, HIDDEN = 3, 16, 32
STATE = {
    "layers": {"up": (LAYERS, WIDTH, HIDDEN), "down": (LAYERS, HIDDEN, WIDTH)},
    "head": (WIDTH, 8),
}
UNROLLED = STATE | {
    "layers": [{"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}] * LAYERS
}
ROWS = (16, WIDTH)


def layered_loss(
    kind: str, layer: Callable[[Any, Any], Any], head: Callable[[Any, Any], Any]
) -> Callable[[Any, Any], Any]:
    """The mean square of `head(state, h)` behind the layers `h = layer(h, weights)`."""

    def body(h, w):
        return layer(h, {k: x.astype(jnp.bfloat16) for k, x in w.items()}), None

    if "remat" in kind:
        body = jax.checkpoint(body, prevent_cse="scan" not in kind)

    def loss_fn(state, x):
        h = x.astype(jnp.bfloat16)
        if "scan" in kind:
            h, _ = lax.scan(body, h, state["layers"])
        else:
            for w in state["layers"]:
                h, _ = body(h, w)
        return jnp.mean(head(state, h.astype(jnp.float32)) ** 2)

    return loss_fn


def train(kind: str, microbatches: int = 1) -> Callable[[Any, Any], Any]:
    """A step on `STATE`: residual layers in bfloat16, a head, plain descent."""

    def layer(h, w):
        return h + jnp.tanh(h @ w["up"]) @ w["down"]

    return descent(
        layered_loss(kind, layer, lambda state, h: h @ state["head"]), microbatches
    )


def descent(
    loss_fn: Callable[[Any, Any], Any], microbatches: int = 1, rate: float = 0.1
) -> Callable[[Any, Any], Any]:
    """A step of plain descent, its gradients added up over microbatches."""

    def step(state, x):
        def accumulate(grads, part):
            loss, more = jax.value_and_grad(loss_fn)(state, part)
            return jax.tree.map(jnp.add, grads, more), loss

        if microbatches == 1:
            loss, grads = jax.value_and_grad(loss_fn)(state, x)
        else:
            zeros = jax.tree.map(jnp.zeros_like, state)
            parts = x.reshape(microbatches, -1, x.shape[1])
            grads, loss = lax.scan(accumulate, zeros, parts)
        return jax.tree.map(lambda w, g: w - rate * g, state, grads), loss

    return step
