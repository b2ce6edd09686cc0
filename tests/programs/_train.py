"""In: a loss and an optax transformation. Out: the program that most people write:
`value_and_grad`, `tx.update`, `apply_updates`; and the layers that programs share.
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


def descend(
    name: str,
    init: Callable[[jax.Array], Tree],
    loss_fn: Callable[[Tree, Tree], tuple[jax.Array, Tree]],
    batch: Callable[[int], Tree],
    rate: float = 0.05,
    **kwargs,
) -> Program:
    """The program whose state is what `init` makes and which goes down the gradient of
    `loss_fn(state, batch) -> (loss, metrics)`."""

    def train_step(state, batch):
        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, metrics), grads = grad_fn(state, batch)
        state = jax.tree.map(lambda p, g: p - rate * jnp.conj(g), state, grads)
        return state, {"loss": loss, **metrics}

    return Program(name, init, train_step, batch, **kwargs)


def normal_params(key: jax.Array, /, **shapes: tuple[int, ...]) -> dict:
    """Normal weights of deviation 0.3, by name."""
    keys = jax.random.split(key, len(shapes))
    return {
        name: 0.3 * jax.random.normal(k, shape)
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean cross entropy with integer labels."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def layer_norm(x: jax.Array) -> jax.Array:
    """Without scale and bias."""
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-3)


def attention_params(key: jax.Array, width: int, heads: int, head: int) -> dict:
    """Weights of `attention`: `q`, `k`, `v` and `o`."""
    into = (width, heads, head)
    return normal_params(key, q=into, k=into, v=into, o=(heads, head, width))


def attention(
    params: dict, x_BxTxD: jax.Array, y_BxSxD: jax.Array, **options
) -> jax.Array:
    """Attention of `x` to `y` by `jax.nn.dot_product_attention`."""
    q = jnp.einsum("btd,dhk->bthk", x_BxTxD, params["q"])
    k, v = (jnp.einsum("bsd,dhk->bshk", y_BxSxD, params[name]) for name in "kv")
    mixed = jax.nn.dot_product_attention(q, k, v, **options)
    return jnp.einsum("bthk,hkd->btd", mixed, params["o"])


def dense_params(key: jax.Array, *widths: int) -> list[dict]:
    """A list of `{"w": [m, n], "b": [n]}`, one per pair of neighbouring widths."""
    keys = jax.random.split(key, len(widths) - 1)

    def layer(key, m, n):
        w = jax.random.normal(key, (m, n)) / m**0.5
        return {"w": w, "b": jnp.full(n, 0.1, jnp.float32)}

    return [layer(*args) for args in zip(keys, widths[:-1], widths[1:], strict=True)]


def perceptron(key: jax.Array) -> list[dict]:
    """Parameters from `vectors` to its outputs, of widths that 8 does not divide."""
    return dense_params(key, 7, 36, 5)


def dense_apply(params: list[dict], x: jax.Array) -> jax.Array:
    """`tanh` between the layers, none after the last."""
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def squared_error(params: list[dict], batch: dict) -> jax.Array:
    """The mean squared error of `dense_apply` over rows and outputs."""
    return ((dense_apply(params, batch["x"]) - batch["y"]) ** 2).mean()
