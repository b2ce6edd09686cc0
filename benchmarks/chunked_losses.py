"""Losses that are computed in chunks of the tokens, so that no device has all logits at
once: what a device sends, holds and takes with shardfn and under `jit`, compiled for
machines that are not there.

    python benchmarks/chunked_losses.py
    python benchmarks/chunked_losses.py --case tokens --chip h100 --plan

The model is Llama 3 8B with its 128,256 words, two rows of 4096 tokens per device, on
64 devices. Cases are the loss as a whole; in 16 chunks of each row's tokens; and in 16
chunks of all tokens, one row after another. Chunks are scanned and rematerialized, and
the head is cast in each. `jit` is given the state as shardfn stores it; `constrained`
also has the batch dimension of activations constrained by hand, and that of a chunk.
"""

import functools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import beside_table
import jax
import jax.numpy as jnp
import optax
from beside_table import Constrain
from criteria_cases import LLAMA3_8B, Case
from criteria_models import Hand, norm, run_stack
from criteria_programs import arguments, update
from jax import lax

from shardfn.analysis import targets

MODEL = replace(LLAMA3_8B, rows=2)
CHUNKS = 16
CASES = {name: Case(name, MODEL, 64) for name in ("whole", "rows", "tokens")}
RESULTS = Path(__file__).parent / "results" / "chunked_losses.json"


def entropies(head: jax.Array, x: jax.Array, targets: jax.Array) -> jax.Array:
    """Sum of cross-entropies in nats, logits in float32."""
    logits = (x @ head.astype(x.dtype)).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.sum(losses)


def cut(x: jax.Array, by: str) -> jax.Array:
    """`x` of shape `[B, T, ...]` in chunks, of each row's tokens or of all tokens."""
    if by == "tokens":
        return x.reshape(CHUNKS, -1, *x.shape[2:])
    return jnp.moveaxis(x.reshape(x.shape[0], CHUNKS, -1, *x.shape[2:]), 1, 0)


def mean_loss(params: Any, batch: Any, by: str, rows: Constrain) -> jax.Array:
    """Mean cross-entropy in nats."""
    x = rows(params["embedding"].astype(jnp.bfloat16)[batch["inputs"]])
    hand = Hand(activations=rows)
    x = run_stack(params["layers"], x, MODEL, hand, "layers", causal=True)
    x, y = norm(x, params["norm"].astype(x.dtype)), batch["targets"]
    if by == "whole":
        return entropies(params["head"], x, y) / y.size

    @jax.checkpoint
    def add(total: jax.Array, chunk: Any) -> tuple[jax.Array, None]:
        x, y = map(rows, chunk)
        return total + entropies(params["head"], x, y), None

    return lax.scan(add, jnp.float32(0), (cut(x, by), cut(y, by)))[0] / y.size


def make_step(by: str, rows: Constrain) -> Callable[..., Any]:
    def train_step(state: Any, batch: Any) -> Any:
        loss_of = functools.partial(mean_loss, by=by, rows=rows)
        loss, grads = jax.value_and_grad(loss_of)(state["params"], batch)
        return update(state, grads), loss

    return train_step


def measured(name: str, chip: str, program: str, shown: bool = False) -> dict[str, Any]:
    """A row of JSON."""
    case = CASES[name]
    target, args = case.target(chip), arguments(MODEL, case.devices)
    make = functools.partial(make_step, name)
    return beside_table.measured(
        program, make, args, targets.mesh(target), target, shown
    )


if __name__ == "__main__":
    beside_table.print_table(__doc__, CASES, RESULTS, measured)
