"""In: nothing. Out: reinforcement learning: values with a target network, and a policy
trained on shuffled minibatches of its own steps.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._data import ROWS, vectors
from ._program import Program, register
from ._train import dense_apply, dense_params, perceptron


def transitions(seed):
    """States, what was done there, what it gave, and the states that followed."""
    rng = np.random.default_rng(seed)
    return {
        "x": vectors(seed)["x"],
        "next": vectors(seed + 100)["x"],
        "action": rng.integers(0, 5, ROWS, dtype=np.int32),
        "reward": rng.standard_normal(ROWS, dtype=np.float32),
        "done": rng.integers(0, 2, ROWS) == 0,
    }


@register("q_learning")
def q_learning() -> Program:
    """Double Q-learning; the target network is copied in every second step."""
    tx = optax.adam(1e-2)

    def init(key):
        params = perceptron(key)
        target = jax.tree.map(jnp.copy, params)
        state = {"params": params, "target": target, "opt": tx.init(params)}
        return state | {"step": jnp.int32(0)}

    def train_step(state, batch):
        def loss_fn(params):
            best = dense_apply(params, batch["next"]).argmax(-1)
            after = dense_apply(state["target"], batch["next"])
            after = jnp.take_along_axis(after, best[:, None], axis=1)[:, 0]
            target = batch["reward"] + 0.9 * jnp.where(batch["done"], 0.0, after)
            values = dense_apply(params, batch["x"])[jnp.arange(ROWS), batch["action"]]
            error = values - jax.lax.stop_gradient(target)
            return optax.huber_loss(error).mean(), jnp.abs(error)

        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, errors), grads = grad_fn(state["params"])
        updates, opt = tx.update(grads, state["opt"])
        params = optax.apply_updates(state["params"], updates)
        copy = optax.periodic_update(params, state["target"], state["step"], 2)
        new = {"params": params, "target": copy, "opt": opt, "step": state["step"] + 1}
        return new, {"loss": loss, "priorities": errors}

    return Program("q_learning", init, train_step, transitions)


@register("policy_minibatches")
def policy_minibatches() -> Program:
    """PPO: advantages by a scan against time, then two epochs of a scan over shuffled
    minibatches with a clipped ratio."""
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))

    def init(key):
        params_key, loop_key = jax.random.split(key)
        params = dense_params(params_key, 7, 36, 6)
        return {"params": params, "opt": tx.init(params), "key": loop_key}

    def advantages(reward_TxB, value_TxB):
        def back(after, now):
            reward, value, following = now
            after = reward + 0.9 * following - value + 0.8 * after
            return after, after

        following = jnp.concatenate((value_TxB[1:], jnp.zeros_like(value_TxB[:1])))
        xs = reward_TxB, value_TxB, following
        return jax.lax.scan(back, jnp.zeros(ROWS), xs, reverse=True)[1]

    def policy(params, x):
        out = dense_apply(params, x)
        return jax.nn.log_softmax(out[..., :5]), out[..., 5]

    def train_step(state, batch):
        key, *keys = jax.random.split(state["key"], 3)
        log_p, value = policy(state["params"], batch["x"])
        gain = advantages(batch["reward"].T, value.T).T
        taken = jnp.take_along_axis(log_p, batch["action"][..., None], -1)[..., 0]
        rows = batch | {"old": taken, "gain": gain, "goal": gain + value}

        def loss_fn(params, rows):
            log_p, value = policy(params, rows["x"])
            taken = jnp.take_along_axis(log_p, rows["action"][..., None], -1)[..., 0]
            ratio = jnp.exp(taken - rows["old"])
            gain = (rows["gain"] - rows["gain"].mean()) / (rows["gain"].std() + 1e-3)
            clipped = jnp.clip(ratio, 0.8, 1.2)
            won = jnp.minimum(ratio * gain, clipped * gain).mean()
            return ((value - rows["goal"]) ** 2).mean() - won

        def update(carry, rows):
            params, opt = carry
            loss, grads = jax.value_and_grad(loss_fn)(params, rows)
            updates, opt = tx.update(grads, opt)
            return (optax.apply_updates(params, updates), opt), loss

        def epoch(carry, key):
            order = jax.random.permutation(key, ROWS)
            shuffled = jax.tree.map(
                lambda x: x[order].reshape(2, ROWS // 2, *x.shape[1:]), rows
            )
            return jax.lax.scan(update, carry, shuffled)

        carry = state["params"], state["opt"]
        (params, opt), losses = jax.lax.scan(epoch, carry, jnp.stack(keys))
        return {"params": params, "opt": opt, "key": key}, {"loss": losses.mean()}

    def batch(seed):
        rng = np.random.default_rng(seed)
        return {
            "x": rng.standard_normal((ROWS, 3, 7), dtype=np.float32),
            "action": rng.integers(0, 5, (ROWS, 3), dtype=np.int32),
            "reward": rng.standard_normal((ROWS, 3), dtype=np.float32),
        }

    return Program("policy_minibatches", init, train_step, batch, gathers=True)
