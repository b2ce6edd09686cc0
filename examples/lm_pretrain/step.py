"""The training step as one would write it for one device; nothing here is sharded.

In: a train state and a batch of `inputs_BxT` and `targets_BxT` (int32; a target of
PADDING counts for nothing). Out: the new state and scalar metrics.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from model import GPT, ModelConfig

PADDING = -1

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with a linear warm-up, then a cosine to a tenth of the peak."""

    learning_rate: float = 4e-3
    warmup_steps: int = 50
    weight_decay: float = 0.1
    clip_norm: float = 1.0


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    warmup = min(config.warmup_steps, steps // 2)
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=warmup,
        decay_steps=steps,
        end_value=config.learning_rate / 10,
    )
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(schedule, b2=0.98, weight_decay=config.weight_decay),
    )


def create_state(
    key: jax.Array, model: ModelConfig, optimizer: OptimizerConfig, steps: int
) -> TrainState:
    gpt = GPT(model)
    tokens_1xT = jnp.zeros((1, model.context), jnp.int32)
    return TrainState.create(
        apply_fn=gpt.apply,
        params=gpt.init(key, tokens_1xT)["params"],
        tx=make_optimizer(optimizer, steps),
    )


def sum_of_losses(logits_BxTxV: jax.Array, targets_BxT: jax.Array):
    """Returns the summed cross-entropy in nats and the number of targets in it."""
    counts_BxT = targets_BxT != PADDING
    losses_BxT = optax.softmax_cross_entropy_with_integer_labels(
        logits_BxTxV, jnp.maximum(targets_BxT, 0)
    )
    return jnp.sum(losses_BxT * counts_BxT), jnp.sum(counts_BxT)


def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    dropout_key = jax.random.fold_in(jax.random.key(0), state.step)

    def mean_loss(params):
        logits_BxTxV = state.apply_fn(
            {"params": params},
            batch["inputs"],
            train=True,
            rngs={"dropout": dropout_key},
        )
        total, count = sum_of_losses(logits_BxTxV, batch["targets"])
        return total / count

    loss, grads = jax.value_and_grad(mean_loss)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def eval_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """Returns the state as it was, so that it has the signature of a training step."""
    logits_BxTxV = state.apply_fn({"params": state.params}, batch["inputs"])
    total, count = sum_of_losses(logits_BxTxV, batch["targets"])
    return state, {"total": total, "count": count}
