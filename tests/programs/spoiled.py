"""In: nothing. Out: one step that works, `train_step`, and ways to spoil it: it changes
its state, returns none, has side effects, or uses control flow.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback


def make_batch(rows: int = 16) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, 7), dtype=np.float32)
    return {"x": x, "y": rng.standard_normal((rows, 24), dtype=np.float32)}


def init(key):
    return {"w": jax.random.normal(key, (7, 24)), "count": jnp.int32(0)}


def train_step(state, batch):
    """The step that works."""

    def loss_fn(w):
        return jnp.square(batch["x"] @ w - batch["y"]).mean()

    loss, grad = jax.value_and_grad(loss_fn)(state["w"])
    state = {"w": state["w"] - 0.1 * grad, "count": state["count"] + 1}
    return state, {"loss": loss}


plain_step = train_step


def changed(**changes: Callable[[jax.Array], jax.Array]) -> Callable:
    """The step that works, with functions applied to leaves of its new state."""

    def train_step(state, batch):
        new, metrics = plain_step(state, batch)
        return new | {k: f(new.get(k)) for k, f in changes.items()}, metrics

    return train_step


def returning(choose: Callable) -> Callable:
    """A step that returns something chosen from what the working step returns."""

    def train_step(state, batch):
        return choose(*plain_step(state, batch))

    return train_step


def with_effect(effect: Callable[[jax.Array], object]) -> Callable:
    def train_step(state, batch):
        new, metrics = plain_step(state, batch)
        effect(metrics["loss"])
        return new, metrics

    return train_step


EFFECTS = {
    "ordered print": lambda x: jax.debug.print("loss {}", x, ordered=True),
    "ordered callback": lambda x: io_callback(lambda _: None, None, x, ordered=True),
    "callback": lambda x: io_callback(lambda _: None, None, x),
}


def looped_effect(x):
    def body(carry, _):
        io_callback(lambda _: None, None, carry, ordered=True)
        return carry, None

    jax.lax.scan(body, x, length=2)


def with_control_flow(loss: jax.Array) -> jax.Array:
    """Uses each construct whose body the flags hide."""
    tanh = jax.custom_jvp(jnp.tanh)
    tanh.defjvps(lambda t, ans, x: t * (1 - ans**2))
    square = jax.custom_vjp(lambda x: x * x)
    square.defvjp(lambda x: (x * x, x), lambda x, ct: (2 * x * ct,))
    loss, _ = jax.lax.scan(lambda c, _: (c * 1.5, None), loss, length=2)
    return jax.checkpoint(lambda x: tanh(square(x)))(loss)
