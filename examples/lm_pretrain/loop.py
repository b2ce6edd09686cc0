"""The training loop: a state and batches in, the trained state out.

A step's metrics are read while the next one runs. A loss that is not finite ends the
run, and what led to it is written down.
"""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import grain
import jax
import numpy as np
from data import Batch
from machine import Machine
from metrics import Metrics


class Diverged(ArithmeticError):
    """The loss of a step is not finite."""


class Pending(NamedTuple):
    """A step that was started, and whose metrics were not read yet."""

    number: int
    batch: Batch
    metrics: dict[str, jax.Array]


class Trained(NamedTuple):
    state: Any
    number: int  # of the last step taken
    losses: list[float]


Save = Callable[[int, Any, dict[str, Any]], None]


def train(
    on: Machine,
    state: Any,
    batches: grain.DatasetIterator,
    numbers: range,
    metrics: Metrics,
    save: Save,
    save_every: int,
    must_stop: Callable[[int], bool],
    validate: Callable[[int, Any], None] = lambda number, state: None,
    eval_every: int = 0,
    during: Callable[[int, Any], Any] = lambda number, state: nullcontext(),
) -> Trained:
    """Takes the steps `numbers`; saves every so many, at the end, and when stopped;
    validates every so many. Each step is taken in the context `during`."""
    pending, losses, number = None, [], numbers.start - 1
    for number in numbers:
        batch = next(batches)
        with during(number, state):
            state, made = on.train(state, on.place(batch))
        if pending:
            losses.append(settle(pending, state, metrics))
        pending = Pending(number, batch, made)
        stops = must_stop(number) or number == numbers.stop - 1
        if stops or (save_every and number % save_every == 0):
            losses.append(settle(pending, state, metrics))  # no NaN is ever saved
            pending = None
            if save_every:
                save(number, state, batches.get_state())
        if eval_every and number % eval_every == 0:
            if pending:
                losses.append(settle(pending, state, metrics))
                pending = None
            validate(number, state)
        if stops:
            break
    return Trained(state, number, losses)


def settle(pending: Pending, state: Any, metrics: Metrics) -> float:
    """Waits for a step and notes its metrics; returns its loss."""
    loss = float(pending.metrics["loss"])
    norms = np.asarray(pending.metrics["grad_norms"])
    metrics.add(pending.number, loss, float(np.linalg.norm(norms)))
    if not np.isfinite(loss):
        raise Diverged(write_down(pending, loss, norms, state, metrics.folder))
    return loss


def write_down(
    pending: Pending, loss: float, norms: np.ndarray, state: Any, run: Path
) -> str:
    """Saves the batch and which gradients are not finite; returns a message."""
    named, _ = jax.tree_util.tree_flatten_with_path(state.params)
    names = [jax.tree_util.keystr(path) for path, _ in named]
    bad = [name for name, x in zip(names, norms, strict=True) if not np.isfinite(x)]
    folder = run / "diverged" / f"step_{pending.number}"
    folder.mkdir(parents=True, exist_ok=True)
    process = jax.process_index()
    np.savez(folder / f"batch_{process}.npz", **pending.batch)
    report = {"step": pending.number, "loss": str(loss), "bad_gradients": bad}
    (folder / f"report_{process}.json").write_text(json.dumps(report, indent=2))
    first = f"the first bad gradient is {bad[0]}" if bad else "all gradients are finite"
    return (
        f"the loss of step {pending.number} is {loss}; {first}, of {len(bad)} of "
        f"{len(names)}. The batch and their names are in {folder}. No state after that "
        "step was saved: start from the last one with a smaller "
        "--optimizer.learning-rate or --optimizer.clip-norm."
    )
