"""In: sizes. Out: training steps of a ResNet-50 and of a recommendation model with a
table of rows, as one writes them for one device, with their arguments as shapes.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

SGD = optax.sgd(0.1, momentum=0.9)
ADAM = optax.adam(1e-3)
Arguments = tuple[Any, Any]


class Block(nn.Module):
    """A bottleneck of He et al., arXiv:1512.03385, whose stride is in its 3 x 3."""

    width: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def conv(features: int, kernel: int, stride: int, x: jax.Array) -> jax.Array:
            sizes = (kernel, kernel), (stride, stride)
            x = nn.Conv(features, *sizes, use_bias=False, dtype=jnp.bfloat16)(x)
            return nn.BatchNorm(use_running_average=False, dtype=jnp.bfloat16)(x)

        y = nn.relu(conv(self.width, 1, 1, x))
        y = nn.relu(conv(self.width, 3, self.stride, y))
        y = conv(4 * self.width, 1, 1, y)
        if x.shape != y.shape:
            x = conv(4 * self.width, 1, self.stride, x)
        return nn.relu(x + y)


class ResNet50(nn.Module):
    """Logits of 1,000 classes."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(64, (7, 7), (2, 2), use_bias=False, dtype=jnp.bfloat16)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=jnp.bfloat16)(x))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for at, blocks in enumerate((3, 4, 6, 3)):
            for block in range(blocks):
                x = Block(64 * 2**at, 2 if at and not block else 1)(x)
        return nn.Dense(1000)(x.mean((1, 2)).astype(jnp.float32))


def resnet_step(state: Any, batch: Any) -> Any:
    """Momentum; batch norm has the statistics of the whole batch."""

    def loss_fn(params: Any) -> Any:
        logits, changed = ResNet50().apply(
            {"params": params, "batch_stats": state["stats"]},
            batch["images"],
            mutable=["batch_stats"],
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits, batch["labels"]
        )
        return losses.mean(), changed["batch_stats"]

    (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
    updates, opt = SGD.update(grads, state["opt"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "stats": stats, "opt": opt}, loss


def resnet_arguments(rows: int) -> Arguments:
    """State and batch as shapes."""
    images = jax.ShapeDtypeStruct((rows, 224, 224, 3), jnp.bfloat16)

    def create() -> Any:
        variables = ResNet50().init(
            jax.random.key(0), jnp.zeros((1, 224, 224, 3), jnp.bfloat16)
        )
        params = variables["params"]
        return dict(params=params, stats=variables["batch_stats"], opt=SGD.init(params))

    labels = jax.ShapeDtypeStruct((rows,), jnp.int32)
    return jax.eval_shape(create), {"images": images, "labels": labels}


FEATURES, WIDTH, LAYERS, TABLE = 64, 128, 16, 100_000_000


def interact(x_BxFxD: jax.Array, layer: Any) -> jax.Array:
    """What features have in common, and a linear map of them, after DHEN's ensembles
    (Zhang et al., arXiv:2203.11014)."""
    w = jax.tree.map(lambda x: x.astype(jnp.bfloat16), layer)
    dots_BxFxF = jnp.einsum("bfd,bgd->bfg", x_BxFxD, x_BxFxD)
    met = dots_BxFxF.reshape(len(x_BxFxD), -1) @ w["met"]
    mixed = jnp.einsum("bfd,fg->bgd", x_BxFxD, w["mix"])
    x = x_BxFxD + nn.relu(met.reshape(x_BxFxD.shape) + mixed)
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide**2, axis=(1, 2), keepdims=True) + 1e-6)
    return (wide * scale).astype(x.dtype)


def dhen_step(state: Any, batch: Any) -> Any:
    """Adam for the dense part, row-wise Adagrad for the rows that were looked up."""
    ids_BxF = batch["ids"]

    def loss_fn(dense: Any, rows_BxFxD: jax.Array) -> jax.Array:
        def body(x: jax.Array, layer: Any) -> Any:
            return jax.checkpoint(interact)(x, layer), None

        x, _ = jax.lax.scan(body, rows_BxFxD.astype(jnp.bfloat16), dense["layers"])
        logits_B = x.reshape(len(x), -1).astype(jnp.float32) @ dense["head"]
        return optax.sigmoid_binary_cross_entropy(logits_B, batch["clicked"]).mean()

    rows_BxFxD = state["table"][ids_BxF]
    found = jax.value_and_grad(loss_fn, argnums=(0, 1))(state["dense"], rows_BxFxD)
    loss, (grads, rows_grad) = found
    updates, opt = ADAM.update(grads, state["opt"])
    squares = state["squares"].at[ids_BxF].add((rows_grad**2).mean(-1))
    change = rows_grad * jax.lax.rsqrt(squares[ids_BxF])[..., None]
    return {
        "table": state["table"].at[ids_BxF].add(-change),
        "squares": squares,
        "dense": optax.apply_updates(state["dense"], updates),
        "opt": opt,
    }, loss


def dhen_arguments(rows: int) -> Arguments:
    """State and batch as shapes: 0.54 billion dense parameters, a table of 100 million
    rows."""
    F, D = FEATURES, WIDTH

    def create() -> Any:
        layers = {
            "met": jnp.zeros((LAYERS, F * F, F * D)),
            "mix": jnp.zeros((LAYERS, F, F)),
        }
        dense = {"layers": layers, "head": jnp.zeros(F * D)}
        return {
            "table": jnp.zeros((TABLE, D)),
            "squares": jnp.zeros(TABLE),
            "dense": dense,
            "opt": ADAM.init(dense),
        }

    ids = jax.ShapeDtypeStruct((rows, F), jnp.int32)
    clicked = jax.ShapeDtypeStruct((rows,), jnp.float32)
    return jax.eval_shape(create), {"ids": ids, "clicked": clicked}
