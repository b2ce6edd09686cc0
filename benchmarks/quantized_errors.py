"""What rounding to eight bits does in one step of the example's language model, by what
is rounded: norms, the table that makes logits, all other weights, and gradients.

The model of `quantized_training.py`, its two tables apart, is trained for a few steps,
and then read with some of its leaves rounded in blocks, on text that it has not seen.
Terms of eight devices' gradients are summed as they are and rounded, over some steps,
with what rounding took added to the next term (error feedback) and without.

    python benchmarks/quantized_errors.py              # minutes on two cores
    python benchmarks/quantized_errors.py --trained 2 --summed 3 --preset 1m
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import quantized_training as training
from data import Share, heldout_batches, training_batches
from step import create_state, sum_of_losses, train_step

from shardfn._core.quantize import dequantize, quantize
from shardfn._core.quantized import Quantized

DEVICES = 8
SELECTED: dict[str, Callable[[str], bool]] = {
    "norms": lambda name: "norm" in name,
    "the table of logits": lambda name: "head" in name,
    "the table of tokens": lambda name: "embed" in name,
    "all other weights": lambda name: (
        not any(part in name for part in ("norm", "head", "embed"))
    ),
    "all": lambda name: True,
}
"""Which leaves are rounded, by the name of the row."""


def rounded(x: jax.Array, dtype: str, rounding: Any = "nearest", salt: int = 0) -> Any:
    """`x` as it is read behind the wire, in blocks along its last dimension."""
    block = next(b for b in range(128, 0, -1) if x.shape[-1] % b == 0)
    how = Quantized(dtype, block, x.ndim - 1, rounding)
    return dequantize(*quantize(x, how, salt), how, x.dtype)


def norm(tree: Any) -> float:
    return float(jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(tree))))


def apart(a: Any, b: Any) -> float:
    """The norm of the difference over that of `b`."""
    return norm(jax.tree.map(jnp.subtract, a, b)) / norm(b)


def weights(state: Any, batch: Any, dtype: str) -> list[str]:
    """Rows of the table of rounded weights."""

    @jax.jit
    def read(params: Any) -> Any:
        def mean_loss(params: Any) -> Any:
            logits = state.apply_fn(params, batch, None)
            total, count = sum_of_losses(logits, batch["targets"])
            return total / count, logits

        return jax.value_and_grad(mean_loss, has_aux=True)(params)

    (loss, logits), grads = read(state.params)
    elements = sum(x.size for x in jax.tree.leaves(state.params))
    rows = []
    for name, is_rounded in SELECTED.items():
        count = 0

        def chosen(path: Any, x: jax.Array, is_rounded: Any = is_rounded) -> Any:
            nonlocal count
            named = jax.tree_util.keystr(path, simple=True, separator="/")
            if not is_rounded(named):
                return x
            count += x.size
            return rounded(x, dtype)

        params = jax.tree_util.tree_map_with_path(chosen, state.params)
        (other, moved), found = read(params)
        rows.append(
            f"{name:<22}{dtype:<16}{count / elements:>9.2%}"
            f"{apart(moved, logits):>10.3%}{apart(found, grads):>11.3%}"
            f"{float(other - loss):>+11.5f}"
        )
    return rows


def sums(state: Any, batches: list[Any], dtype: str) -> list[str]:
    """Rows of the table of rounded terms: the mean of a sum over steps."""

    @jax.jit
    def terms(params: Any, batch: Any) -> Any:
        def of_rows(rows: Any) -> Any:
            def total(params: Any) -> Any:
                return sum_of_losses(
                    state.apply_fn(params, rows, None), rows["targets"]
                )[0]

            return jax.grad(total)(params)

        parts = jax.tree.map(lambda x: x.reshape(DEVICES, -1, *x.shape[1:]), batch)
        return jax.lax.map(of_rows, parts)

    @functools.partial(jax.jit, static_argnames=("rounding", "feedback"))
    def step(found: Any, residual: Any, number: Any, rounding: str, feedback: bool):
        given = jax.tree.map(jnp.add, found, residual) if feedback else found
        salts = number * DEVICES + jnp.arange(DEVICES)
        made = jax.tree.map(
            lambda x: jax.vmap(lambda t, s: rounded(t, dtype, rounding, s))(x, salts),
            given,
        )
        left = jax.tree.map(jnp.subtract, given, made) if feedback else residual
        return jax.tree.map(lambda x: x.sum(0), made), left

    kinds = {
        "rounded": ("nearest", False),
        "rounded by chance": ("stochastic", False),
        "with error feedback": ("nearest", True),
    }
    exact: Any = None
    totals: dict[str, Any] = dict.fromkeys(kinds)
    left: dict[str, Any] = {}
    first: dict[str, float] = {}
    add = functools.partial(jax.tree.map, jnp.add)
    for number, batch in enumerate(batches):
        found = terms(state.params, batch)
        whole = jax.tree.map(lambda x: x.sum(0), found)
        exact = whole if exact is None else add(exact, whole)
        for name, how in kinds.items():
            residual = left.get(name, jax.tree.map(jnp.zeros_like, found))
            made, left[name] = step(found, residual, jnp.uint32(number), *how)
            first.setdefault(name, apart(made, whole))
            totals[name] = made if number == 0 else add(totals[name], made)
    return [
        f"{name:<22}{dtype:<16}{first[name]:>10.3%}{apart(totals[name], exact):>12.4%}"
        for name in kinds
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", choices=training.MODELS, default="5m")
    parser.add_argument("--trained", type=int, default=100, help="steps before")
    parser.add_argument("--summed", type=int, default=50, help="steps of sums")
    given = parser.parse_args()
    model = dataclasses.replace(training.MODELS[given.preset], tied=False)
    study = training.Study(given.preset, given.trained, DEVICES, 1, training.Path(), 1)
    text, heldout = study.texts
    state = create_state(jax.random.key(0), model, training.OPTIMIZER, given.trained)
    share = Share(DEVICES)
    batches = training_batches(text, model.context, share, 0)
    step = jax.jit(train_step, donate_argnums=0)
    for _ in range(given.trained):
        state, metrics = step(state, next(batches))
    print(f"after {given.trained} steps, loss {float(metrics['loss']):.3f}")
    batch = next(iter(heldout_batches(heldout, model.context, share)))
    batch = jax.tree.map(np.asarray, batch)
    print(f"{'rounded':<22}{'to':<16}{'elements':>9}{'logits':>10}"
          f"{'gradient':>11}{'loss':>11}")  # fmt: skip
    for dtype in ("int8", "float8_e4m3fn"):
        print(*weights(state, batch, dtype), sep="\n", flush=True)
    print(f"{'sums of 8 terms':<22}{'to':<16}{'one step':>10}"
          f"{f'mean of {given.summed}':>12}")  # fmt: skip
    several = [next(batches) for _ in range(given.summed)]
    print(*sums(state, several, "int8"), sep="\n", flush=True)


if __name__ == "__main__":
    main()
