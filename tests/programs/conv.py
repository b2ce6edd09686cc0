"""In: nothing. Out: convolutional networks: batch norm with statistics over the whole
batch, max pooling, residual blocks; group norm, depthwise convolution, average pooling.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from ._data import images
from ._program import Program, register


class BatchNormNet(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        for features in (12, 20):
            # No bias: batch norm subtracts it, so that its true gradient is zero.
            x = nn.Conv(features, (3, 3), use_bias=False)(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
            x = nn.max_pool(nn.relu(x), (2, 2), strides=(2, 2))
        return nn.Dense(7)(x.reshape(x.shape[0], -1))


class BatchNormState(TrainState):
    batch_stats: Any


class ResNet(nn.Module):
    """A stem and a block whose second half has a stride and projects what it skips."""

    @nn.compact
    def __call__(self, x, train: bool):
        def conv_norm(features, kernel, strides, x):
            x = nn.Conv(features, kernel, strides, use_bias=False)(x)
            return nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)

        x = nn.relu(conv_norm(12, (3, 3), (1, 1), x))
        skipped = conv_norm(20, (1, 1), (2, 2), x)
        x = nn.relu(conv_norm(20, (3, 3), (2, 2), x))
        x = nn.relu(conv_norm(20, (3, 3), (1, 1), x) + skipped)
        return nn.Dense(7)(x.mean((1, 2)))


def batch_norm_program(name: str, model: nn.Module, **kwargs) -> Program:
    """Trains a model that keeps statistics of the whole batch."""
    tx = optax.sgd(0.05, momentum=0.9)

    def init(key):
        variables = model.init(key, jnp.zeros((1, 8, 8, 3)), train=False)
        return BatchNormState.create(
            apply_fn=model.apply,
            params=variables["params"],
            batch_stats=variables["batch_stats"],
            tx=tx,
        )

    def train_step(state, batch):
        def loss_fn(params):
            logits, updated = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats},
                batch["image"],
                train=True,
                mutable=["batch_stats"],
            )
            labels = batch["label"]
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return loss.mean(), (logits, updated["batch_stats"])

        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, (logits, stats)), grads = grad_fn(state.params)
        accuracy = (jnp.argmax(logits, -1) == batch["label"]).mean()
        state = state.apply_gradients(grads=grads, batch_stats=stats)
        return state, {"loss": loss, "accuracy": accuracy}

    return Program(name, init, train_step, images, **kwargs)


@register("conv_batch_norm")
def conv_batch_norm() -> Program:
    return batch_norm_program("conv_batch_norm", BatchNormNet())


@register("conv_residual")
def conv_residual() -> Program:
    return batch_norm_program("conv_residual", ResNet())


class GroupNormNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(16, (3, 3), strides=(2, 2))(x)
        x = nn.swish(nn.GroupNorm(num_groups=4)(x))
        x = nn.Conv(16, (3, 3), feature_group_count=16, use_bias=False)(x)
        x = nn.avg_pool(nn.gelu(nn.Conv(36, (1, 1))(x)), (2, 2), strides=(2, 2))
        return nn.Dense(7)(x.mean((1, 2)))


@register("conv_group_norm")
def conv_group_norm() -> Program:
    model, tx = GroupNormNet(), optax.adamw(1e-3)

    def init(key):
        params = model.init(key, jnp.zeros((1, 8, 8, 3)))
        return params, tx.init(params)

    def train_step(state, batch):
        params, opt = state

        def loss_fn(params):
            logits = model.apply(params, batch["image"][:, ::-1])
            targets = optax.smooth_labels(jax.nn.one_hot(batch["label"], 7), 0.1)
            return optax.softmax_cross_entropy(logits, targets).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), {"loss": loss}

    return Program("conv_group_norm", init, train_step, images)
