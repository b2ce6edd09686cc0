"""Trains a recommendation model (Naumov et al., DLRM, arXiv:1906.00091) on made-up
clicks: one table of all categories, which stays where it is stored, and perceptrons.

python examples/dlrm/dlrm.py --devices 8
"""

import dataclasses
import functools
import itertools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from clicks import COUNTS, SIZES, make_batch, table_sizes

import shardfn

ADAM = optax.adam(1e-3)
Batch = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Flags:
    """Prints the loss of training steps."""

    steps: int = 100
    batch_size: int = 2048
    width: int = 16
    """Of a table's row."""
    most: int = 100_000
    """Rows of the table per feature, at most; Criteo's have up to ten million."""
    log_every: int = 20
    plain: bool = False
    """Train on one device, without shardfn."""
    plan: bool = False
    """Print what the devices send, and train nothing."""
    devices: int | None = None
    """Make this many CPU devices; none stands for the devices that JAX finds."""


def init_layers(key: jax.Array, *widths: int) -> list[dict[str, jax.Array]]:
    pairs = list(itertools.pairwise(widths))
    keys = jax.random.split(key, len(pairs))
    return [
        {"w": jax.random.normal(k, (i, o)) * (2 / i) ** 0.5, "b": jnp.zeros(o)}
        for k, (i, o) in zip(keys, pairs, strict=True)
    ]


def table_rows(most: int) -> int:
    """Of all features, and some more, so that every device has as many."""
    return -(-int(table_sizes(most).sum()) // 1024) * 1024


def create_state(key: jax.Array, width: int, most: int) -> Any:
    """The table is updated by row-wise Adagrad, the rest by Adam."""
    D, F, rows = width, len(SIZES), table_rows(most)
    pairs = F * (F + 1) // 2
    table_key, bottom_key, top_key = jax.random.split(key, 3)
    layers = {
        "bottom": init_layers(bottom_key, COUNTS, 64, D),
        "top": init_layers(top_key, D + pairs, 128, 64, 1),
    }
    table = 0.1 * jax.random.normal(table_key, (rows, D))
    return {
        "table": table,
        "squares": jnp.full(rows, 0.1),
        "layers": layers,
        "opt": ADAM.init(layers),
    }


def apply_layers(layers: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
    for layer in layers[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ layers[-1]["w"] + layers[-1]["b"]


def apply(layers: Any, rows_BxFxD: jax.Array, counts_BxN: jax.Array) -> jax.Array:
    """The logits, [B]: features meet in pairs, as dot products of their rows."""
    dense_BxD = apply_layers(layers["bottom"], counts_BxN)
    all_BxGxD = jnp.concatenate((dense_BxD[:, None], rows_BxFxD), axis=1)
    dots_BxGxG = jnp.einsum("bgd,bhd->bgh", all_BxGxD, all_BxGxD)
    one, other = np.triu_indices(all_BxGxD.shape[1], k=1)
    met_BxP = dots_BxGxG[:, one, other]
    return apply_layers(layers["top"], jnp.concatenate((dense_BxD, met_BxP), 1))[:, 0]


def train_step(state: Any, batch: Batch) -> Any:
    """One step on one device. Gradients are of the rows that were looked up, so that
    nothing has the shape of the table but the table."""
    ids_BxF = batch["ids_BxF"]

    def loss_fn(layers: Any, rows_BxFxD: jax.Array) -> jax.Array:
        logits_B = apply(layers, rows_BxFxD, batch["counts_BxN"])
        return optax.sigmoid_binary_cross_entropy(logits_B, batch["clicked_B"]).mean()

    rows_BxFxD = state["table"][ids_BxF]
    grad_fn = jax.value_and_grad(loss_fn, argnums=(0, 1))
    loss, (grads, rows_grad_BxFxD) = grad_fn(state["layers"], rows_BxFxD)
    updates, opt = ADAM.update(grads, state["opt"])
    squares = state["squares"].at[ids_BxF].add((rows_grad_BxFxD**2).mean(-1))
    change_BxFxD = rows_grad_BxFxD * jax.lax.rsqrt(squares[ids_BxF])[..., None]
    new_state = {
        "table": state["table"].at[ids_BxF].add(-change_BxFxD),
        "squares": squares,
        "layers": optax.apply_updates(state["layers"], updates),
        "opt": opt,
    }
    return new_state, loss


def main(flags: Flags) -> list[float]:
    """Returns the loss of every step."""
    if flags.devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", flags.devices)
    key = jax.random.key(0)
    create = functools.partial(create_state, width=flags.width, most=flags.most)

    def batch(number: int) -> Batch:
        return make_batch(number, flags.batch_size, flags.most)

    if flags.plain:
        step = jax.jit(train_step, donate_argnums=0)
        state = jax.jit(create)(key)
    else:
        # Split on its columns, a lookup sends row numbers, and each row once.
        mesh = jax.make_mesh((jax.device_count(),), ("data",))
        step = shardfn.fully_shard(train_step, mesh, shard={"table": {"data": -1}})
        if flags.plan:
            print(step.plan(jax.eval_shape(create, key), batch(0)))
            return []
        state = step.init(create, key)
    losses, start = [], time.perf_counter()
    for i in range(flags.steps):
        state, loss = step(state, batch(i))
        losses.append(loss)
        if i % flags.log_every == 0 or i == flags.steps - 1:
            recent = float(np.mean(losses[-flags.log_every :]))
            rate = (i + 1) * flags.batch_size / (time.perf_counter() - start)
            print(f"step {i}: loss {recent:.4f}, {rate:,.0f} examples per second")
    return [float(loss) for loss in losses]


if __name__ == "__main__":
    main(tyro.cli(Flags))
