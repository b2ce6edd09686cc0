"""Trains a classifier, its state sharded over 8 CPU devices; prints plan and loss."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import shardfn

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(512)(x)
        x += nn.relu(nn.Dense(512)(nn.LayerNorm()(x)))
        return nn.Dense(16)(nn.LayerNorm()(x))


def create_state(key):
    model = Classifier()
    params = model.init(key, jnp.zeros((1, 64)))["params"]
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


@shardfn.fully_shard(mesh=jax.make_mesh((8,), ("data",)))
def train_step(state, batch):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["x"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return losses.mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def make_batch(key, size=256):
    """Points, and which of 16 fixed directions each is closest to."""
    x = jax.random.normal(key, (size, 64))
    directions = jax.random.normal(jax.random.key(1), (64, 16))
    return {"x": x, "y": jnp.argmax(x @ directions, axis=1)}


def planned():  # python -m shardfn plan examples/quickstart.py:planned --target h100:8
    state = jax.eval_shape(create_state, jax.random.key(0))
    return train_step, state, make_batch(jax.random.key(2))


if __name__ == "__main__":
    state = train_step.init(create_state, jax.random.key(0))
    print(train_step.plan(state, make_batch(jax.random.key(2))))
    for i in range(100):
        state, metrics = train_step(state, make_batch(jax.random.key(i + 2)))
        if i % 20 == 0 or i == 99:
            print(f"step {i:3d}  loss {float(metrics['loss']):.3f}")
