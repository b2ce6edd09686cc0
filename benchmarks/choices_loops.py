"""Steps for `choices.py` whose loops share what is not a plain weight, or whose rows
have two origins: recurrent networks with squashed weights, minibatches that take rows
of a rollout by their numbers, as in PPO, and both halves of a GAN.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Shape = jax.ShapeDtypeStruct
KEY = jax.eval_shape(lambda: jax.random.key(0))


def squashed() -> tuple[Any, Any, Any]:
    """A cell of 4096 units that multiplies with `tanh(w)`, over 64 time steps."""
    units, times, rows = 4096, 64, 1024

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        def cell(h: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(x + h @ jnp.tanh(w).astype(jnp.bfloat16)), None

        h = lax.scan(cell, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))[0]
        return jnp.square(h.astype(jnp.float32)).mean()

    def step(w: jax.Array, x: jax.Array) -> Any:
        value, grad = jax.value_and_grad(loss)(w, x)
        return w - 0.1 * grad, value

    x = Shape((rows, times, units), jnp.bfloat16)
    return step, Shape((units, units), jnp.float32), x


def factored() -> tuple[Any, Any, Any]:
    """A cell of 4096 units with two products of the same two weights, over 64 steps."""
    units, times, rows = 4096, 64, 1024

    def loss(p: Any, x: jax.Array) -> jax.Array:
        def cell(h: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            made = jnp.tanh(p["w"]) * p["gate"]
            both = made.astype(jnp.bfloat16), (made * p["gate"]).astype(jnp.bfloat16)
            return jnp.tanh(h @ both[0] + x @ both[1]), None

        h = lax.scan(cell, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))[0]
        return jnp.square(h.astype(jnp.float32)).mean()

    def step(p: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(p, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), value

    weights = {name: Shape((units, units), jnp.float32) for name in ("w", "gate")}
    return step, weights, Shape((rows, times, units), jnp.bfloat16)


def minibatches() -> tuple[Any, Any, Any]:
    """Observations of 4,096 environments, 128 times, 4 epochs of 256 minibatches."""
    width, environments, times, epochs, parts = 1024, 4096, 128, 4, 256

    def loss(w: Any, seen: jax.Array) -> jax.Array:
        return jnp.square(jnp.tanh(jnp.tanh(seen @ w["in"]) @ w["out"])).mean()

    def learn(w: Any, seen: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(w, seen)
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, grads), value

    def step(w: Any, batch: Any) -> Any:
        def act(seen: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            return jnp.tanh(0.9 * seen), seen

        rollout = lax.scan(act, batch["seen"], length=times)[1].reshape(-1, width)

        def epoch(w: Any, key: jax.Array) -> Any:
            order = jax.random.permutation(key, len(rollout)).reshape(parts, -1)
            return lax.scan(lambda w, rows: learn(w, rollout[rows]), w, order)

        return lax.scan(epoch, w, jax.random.split(batch["key"], epochs))

    weights = {
        "in": Shape((width, 256), jnp.float32),
        "out": Shape((256, 8), jnp.float32),
    }
    seen = Shape((environments, width), jnp.float32)
    return step, weights, {"seen": seen, "key": KEY}


def discriminator() -> tuple[Any, Any, Any]:
    """It judges 8,192 rows of the batch, and as many that a small generator makes."""
    rows, noise, width = 8192, 64, 2048

    def judged(w: Any, x: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.tanh(x @ w["in"]) @ w["out"])

    def step(state: Any, x: jax.Array) -> Any:
        key, own = jax.random.split(state["key"])
        made = jax.random.normal(own, (rows, noise)) @ state["generator"]

        def loss(w: Any) -> jax.Array:
            real, other = -judged(w, x), judged(w, made)
            return jax.nn.softplus(real).mean() + jax.nn.softplus(other).mean()

        value, grads = jax.value_and_grad(loss)(state["w"])
        w = jax.tree.map(lambda w, g: w - 0.1 * g, state["w"], grads)
        return {**state, "key": key, "w": w}, value

    state = {
        "w": {
            "in": Shape((noise, width), jnp.float32),
            "out": Shape((width, width), jnp.float32),
        },
        "generator": Shape((noise, noise), jnp.float32),
        "key": KEY,
    }
    return step, state, Shape((rows, noise), jnp.float32)


def generator() -> tuple[Any, Any, Any]:
    """DCGAN's: it makes 8,192 images of noise, which are judged by convolutions."""
    rows, sizes = 8192, (100, 512, 256, 128, 64, 3)
    layout = "NCHW", "OIHW", "NCHW"

    def made(ws: Any, noise: jax.Array) -> jax.Array:
        x = noise[..., None, None]
        for k, w in enumerate(ws):
            how = ((2, 2), "SAME") if k else ((1, 1), "VALID")
            x = lax.conv_transpose(x, w, *how, dimension_numbers=layout)
            x = jnp.tanh(x) if k == len(ws) - 1 else jax.nn.relu(x)
        return x

    def judged(ws: Any, x: jax.Array) -> jax.Array:
        for w in ws:
            x = jax.nn.leaky_relu(lax.conv_general_dilated(x, w, (2, 2), "SAME"), 0.2)
        return x.sum((1, 2, 3))

    def step(state: Any, key: jax.Array) -> Any:
        def loss(ws: Any) -> jax.Array:
            noise = jax.random.normal(key, (rows, sizes[0]))
            return jax.nn.softplus(-judged(state["judge"], made(ws, noise))).mean()

        value, grads = jax.value_and_grad(loss)(state["w"])
        w = jax.tree.map(lambda w, g: w - 0.1 * g, state["w"], grads)
        return {**state, "w": w}, value

    pairs = list(zip(sizes, sizes[1:], strict=False))
    w = [Shape((out, into, 4, 4), jnp.float32) for into, out in pairs]
    judge = [Shape((into, out, 4, 4), jnp.float32) for into, out in pairs[:0:-1]]
    return step, {"w": w, "judge": judge}, KEY
