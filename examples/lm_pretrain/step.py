"""The training step as one would write it for one device; nothing here is sharded.

In: a train state and a batch (see `data`). Out: the new state and metrics.
"""

import functools

import jax
import jax.numpy as jnp
import optax
from attention import PADDING
from config import ModelConfig, OptimizerConfig
from flax.training.train_state import TrainState
from models import Batch, make_model

Metrics = dict[str, jax.Array]


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Returns the learning rate of an update, counted from 0."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=min(config.warmup_steps, steps // 2),
        decay_steps=steps,
        end_value=config.learning_rate / 10,
    )


@functools.cache  # equal configs give the same functions: they are static in a state
def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    schedule = make_schedule(config, steps)
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(schedule, b2=0.98, weight_decay=config.weight_decay),
    )


def create_state(
    key: jax.Array, model: ModelConfig, optimizer: OptimizerConfig, steps: int
) -> TrainState:
    init, apply = make_model(model)
    return TrainState.create(
        apply_fn=apply, params=init(key), tx=make_optimizer(optimizer, steps)
    )


def sum_of_losses(logits_BxTxV: jax.Array, targets_BxT: jax.Array):
    """Returns the summed cross-entropy in nats and the number of targets in it."""
    counts_BxT = targets_BxT != PADDING
    losses_BxT = optax.softmax_cross_entropy_with_integer_labels(
        logits_BxTxV, jnp.maximum(targets_BxT, 0)
    )
    return jnp.sum(losses_BxT * counts_BxT), jnp.sum(counts_BxT)


def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """Metrics are the mean loss and, leaf by leaf, the norm of the gradient."""
    dropout_key = jax.random.fold_in(jax.random.key(0), state.step)

    def mean_loss(params):
        logits_BxTxV = state.apply_fn(params, batch, dropout_key)
        total, count = sum_of_losses(logits_BxTxV, batch["targets"])
        return total / count

    loss, grads = jax.value_and_grad(mean_loss)(state.params)
    squares = [jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)]
    metrics = {"loss": loss, "grad_norms": jnp.sqrt(jnp.stack(squares))}
    return state.apply_gradients(grads=grads), metrics


def eval_step(state: TrainState, batch: Batch) -> Metrics:
    """Returns the sum of the losses of a batch, and how many they are."""
    logits_BxTxV = state.apply_fn(state.params, batch, None)
    total, count = sum_of_losses(logits_BxTxV, batch["targets"])
    return {"total": total, "count": count}
