"""In: nothing. Out: steps that treat the batch as more than a sum over its rows:
accumulation, contrastive loss, masked means, scans and sorts along the batch.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._data import ROWS, tokens, vectors
from ._program import Program, register
from ._train import dense_apply, dense_params, squared_error, train


def perceptron(key):
    return dense_params(key, 7, 36, 43, 5)


@register("accumulate_scan")
def accumulate_scan() -> Program:
    """Two microbatches of eight rows: the reshape moves the dimension that is split."""
    tx = optax.adam(1e-2)

    def init(key):
        params = perceptron(key)
        return {"params": params, "opt": tx.init(params)}

    def train_step(state, batch):
        micro = jax.tree.map(lambda x: x.reshape(2, ROWS // 2, *x.shape[1:]), batch)

        def body(carry, microbatch):
            loss, grads = jax.value_and_grad(squared_error)(state["params"], microbatch)
            return jax.tree.map(jnp.add, carry, (loss, grads)), loss

        zeros = jax.tree.map(jnp.zeros_like, state["params"])
        (loss, grads), losses = jax.lax.scan(body, (jnp.float32(0), zeros), micro)
        grads = jax.tree.map(lambda g: g / 2, grads)
        updates, opt = tx.update(grads, state["opt"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, {"loss": loss / 2, "losses": losses}

    return Program("accumulate_scan", init, train_step, vectors, gathers=True)


@register("contrastive")
def contrastive() -> Program:
    """CLIP: every row is compared with every other row of the whole batch."""

    def init_params(key):
        a, b = jax.random.split(key)
        towers = {"x": dense_params(a, 7, 36, 15), "y": dense_params(b, 5, 36, 15)}
        return towers | {"log_scale": jnp.float32(1.0)}

    def loss_fn(params, batch):
        z = {k: dense_apply(params[k], batch[k]) for k in ("x", "y")}
        z = {k: v / jnp.linalg.norm(v, axis=-1, keepdims=True) for k, v in z.items()}
        logits = jnp.exp(params["log_scale"]) * z["x"] @ z["y"].T
        labels = jnp.arange(ROWS)
        rows = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        columns = optax.softmax_cross_entropy_with_integer_labels(logits.T, labels)
        # The pull on the scale keeps its gradient away from a sum that cancels.
        return (rows + columns).mean() / 2 + 0.1 * params["log_scale"] ** 2

    tx = optax.adam(1e-2)
    return train("contrastive", init_params, loss_fn, tx, vectors, gathers=True)


@register("masked_mean")
def masked_mean() -> Program:
    """sum(w * l) / sum(w): the devices hold different numbers of real tokens."""

    def init_params(key):
        table_key, key = jax.random.split(key)
        table = jax.random.normal(table_key, (101, 15))
        return {"table": table, "dense": dense_params(key, 15, 101)}

    def loss_fn(params, batch):
        logits = dense_apply(params["dense"], params["table"][batch["tokens"]])
        labels, mask = batch["labels"], batch["mask"]
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.sum(loss * mask) / jnp.sum(mask)

    def batch(seed):
        lengths = np.random.default_rng(seed).integers(0, 8, (ROWS, 1))
        mask = (np.arange(7) < lengths).astype(np.float32)
        return tokens(seed) | {"mask": mask}

    return train("masked_mean", init_params, loss_fn, optax.adam(1e-2), batch)


def with_aux(name, loss_fn, batch=vectors, **kwargs) -> Program:
    """Gradient descent on `loss_fn(params, batch) -> (loss, metrics)`."""

    def train_step(state, batch):
        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, metrics), grads = grad_fn(state, batch)
        state = jax.tree.map(lambda p, g: p - 0.02 * g, state, grads)
        return state, {"loss": loss, **metrics}

    return Program(name, perceptron, train_step, batch, **kwargs)


@register("metrics_per_example")
def metrics_per_example() -> Program:
    """Accuracy by argmax, one loss per row, the hardest row, predictions."""

    def loss_fn(params, batch):
        logits = dense_apply(params, batch["x"])
        labels = jnp.argmax(batch["y"], axis=-1)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        predicted = jnp.argmax(logits, axis=-1)
        metrics = {
            "accuracy": (predicted == labels).mean(),
            "correct": (predicted == labels).sum(),
            "losses": losses,
            "logits": logits,
            "predicted": predicted,
            "hardest": losses.max(),
            "first": logits[0],
        }
        return losses.mean(), metrics

    return with_aux("metrics_per_example", loss_fn)


@register("along_the_batch")
def along_the_batch() -> Program:
    """cumsum, sort, top_k, argmax, a flip, a roll and a slice along the rows."""

    def loss_fn(params, batch):
        out = dense_apply(params, batch["x"])
        losses = ((out - batch["y"]) ** 2).mean(-1)
        cumulative = jnp.cumsum(losses)
        neighbours = jnp.roll(out, 1, axis=0)
        hardest, _ = jax.lax.top_k(losses, 3)
        metrics = {
            "cumulative": cumulative,
            "sorted": jnp.sort(losses),
            "hardest_row": jnp.argmax(losses),
            "flipped": losses[::-1],
            "half": losses[: ROWS // 2],
            "median": jnp.median(losses),
        }
        smooth = 0.1 * ((out - neighbours) ** 2).mean()
        return cumulative.mean() + hardest.mean() + smooth, metrics

    return with_aux("along_the_batch", loss_fn, gathers=True)


@register("centred_by_batch")
def centred_by_batch() -> Program:
    """Subtracts the batch's mean, divides by its deviation, decorrelates."""

    def loss_fn(params, batch):
        z = dense_apply(params, batch["x"])
        z = (z - z.mean(0)) / jnp.sqrt(z.var(0) + 1e-3)
        correlation = z.T @ z / ROWS
        target = jnp.tril(jnp.full((5, 5), 0.3))
        loss = ((correlation - target) ** 2).sum() + ((z - batch["y"]) ** 2).mean()
        return loss, {"correlation": correlation}

    return with_aux("centred_by_batch", loss_fn)


@register("attention_across_rows")
def attention_across_rows() -> Program:
    """Each row attends to all rows; segment sums group rows by a label."""

    def loss_fn(params, batch):
        z = dense_apply(params, batch["x"])
        weights = jax.nn.softmax(z @ z.T)
        pooled = weights @ z
        groups = jax.ops.segment_sum(z, batch["group"], num_segments=3)
        loss = ((pooled - batch["y"]) ** 2).mean() + (groups**2).mean()
        return loss, {"groups": groups}

    def batch(seed):
        group = np.random.default_rng(seed).integers(0, 3, ROWS, dtype=np.int32)
        return vectors(seed) | {"group": group}

    return with_aux("attention_across_rows", loss_fn, batch, gathers=True)
