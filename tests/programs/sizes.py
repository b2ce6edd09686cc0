"""In: sizes that 8 does not divide. Out: programs whose parameters have them."""

import jax
import jax.numpy as jnp
import optax

from ._data import tokens, vectors
from ._program import Program, register
from ._train import dense_apply, dense_params, squared_error, train


def _square(size: int) -> None:
    name = f"size_{size}"

    def init_params(key):
        return dense_params(key, size, size, size)

    def batch(seed):
        return vectors(seed, size, size)

    register(name)(
        lambda: train(name, init_params, squared_error, optax.adam(1e-2), batch)
    )


for _size in (3, 5, 7, 15, 17, 129):
    _square(_size)


def _vocabulary(vocab: int) -> None:
    """Embedding `[vocab, 5]` and head `[5, vocab]`: only the padded one is large."""
    name = f"vocab_{vocab}"

    def init_params(key):
        table_key, head_key = jax.random.split(key)
        table = jax.random.normal(table_key, (vocab, 5))
        return {"table": table, "head": dense_params(head_key, 5, vocab)}

    def loss_fn(params, batch):
        x = jnp.take(params["table"], batch["tokens"], axis=0)
        logits, labels = dense_apply(params["head"], x), batch["labels"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def batch(seed):
        return tokens(seed, 3, vocab)

    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))
    register(name)(lambda: train(name, init_params, loss_fn, tx, batch))


for _vocab in (101, 1009):
    _vocabulary(_vocab)


@register("size_norms_of_padded")
def size_norms_of_padded() -> Program:
    """Reads padded leaves in ways that would see the padding: max, min, mean,
    product, logsumexp, a count, argmax, sort, any, all."""

    def init(key):
        return {"w": 1.0 + jax.random.uniform(key, (17, 11)), "n": jnp.arange(19)}

    def train_step(state, batch):
        def loss_fn(w):
            scale = w / (w.min() + jnp.exp(w).mean() + jax.nn.logsumexp(w))
            return ((batch["x"] @ scale - batch["y"]) ** 2).mean()

        loss, grad = jax.value_and_grad(loss_fn)(state["w"])
        w = state["w"] - 0.05 * grad
        metrics = {
            "loss": loss,
            "min": w.min(),
            "min_rows": w.min(0),
            "max": (-w).max(),
            "mean": w.mean(),
            "std": w.std(0),
            "prod": jnp.prod(w[:, 0]),
            "count": (jnp.exp(w) > 0).sum(),
            "argmin": jnp.argmin(w, axis=0),
            "all": (w > 0).all(),
            "any": (jnp.exp(w) < 1).any(),
            "sorted": jnp.sort(w, axis=0)[0],
            "cumsum": jnp.cumsum(w, axis=0)[-1],
            "min_n": (state["n"] + 1).min(),
        }
        return {"w": w, "n": state["n"] + 1}, metrics

    def batch(seed):
        return vectors(seed, 17, 11)

    return Program("size_norms_of_padded", init, train_step, batch)
