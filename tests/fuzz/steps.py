"""The training step that a program stands for.

In: a `Program`. Out: the plain step in the form a user wrote it, its first state and
its batches.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from language import DTYPES, Program, Type, named, run_block

LEARNING_RATE = 0.125

Step = Callable[..., Any]


def make_step(program: Program, operations: dict[str, Callable[..., Any]]) -> Step:
    """The plain training step of `program`, `(state, batch) -> (state, metrics)`."""

    def loss_fn(params: Any, state: Any, key: Any, rows: Any) -> Any:
        env = {**named("p", params), **named("c", state["counts"]), "key": key}
        env = run_block(program.forward, {**env, **named("b", rows)}, operations)
        total = jnp.mean if program.mean else jnp.sum
        loss = sum((total(env[name]) for name in program.losses), 0.0)
        return loss, [env[name] for name in program.forward.outputs]

    wrap = {"": lambda f: f, "jit": jax.jit, "remat": jax.checkpoint}[program.wrap]
    grad_fn = GRADS[program.grads](wrap(loss_fn))

    def grads_of(state: Any, key: Any, rows: Any) -> Any:
        if program.micro == 1:
            return grad_fn(state["params"], state, key, rows)

        def one(total: Any, x: Any) -> Any:
            (loss, aux), grads = grad_fn(state["params"], state, key, x)
            return jax.tree.map(jnp.add, total, (loss, grads)), aux

        parts = [x.reshape(program.micro, -1, *x.shape[1:]) for x in rows]
        dtype = next((w.dtype for w in state["params"]), jnp.float32)
        zero = jnp.zeros((), dtype), jax.tree.map(jnp.zeros_like, state["params"])
        (loss, grads), aux = jax.lax.scan(one, zero, parts)
        return (loss, aux), grads

    def step(state: Any, batch: Any) -> Any:
        key, now = jax.random.split(state["key"])
        (loss, aux), grads = grads_of(state, now, batch["rows"])
        pairs = zip(grads, batch.get("teacher", ()), strict=False)
        grads = [g + 0.5 * t for g, t in pairs] or grads
        norm = jnp.sqrt(sum((jnp.vdot(g, g) for g in grads), 1.0))
        if program.clip:
            grads = [g / jnp.maximum(1.0, norm / 8) for g in grads]
        params, opt = update(program.optimizer, state["params"], grads, state["opt"])
        counts = [c + jnp.ones((), c.dtype) for c in state["counts"]]
        new = {"params": params, "opt": opt, "counts": counts, "key": key}
        return new, {"loss": loss, "norm": norm, "aux": aux}

    return step


# Gradients


def _one(loss_fn: Step) -> Step:
    return jax.value_and_grad(loss_fn, has_aux=True)


def _two(loss_fn: Step) -> Step:
    """Of every other parameter; then, these being others, of the rest."""

    def run(params: Any, *rest: Any) -> Any:
        def of_first(first: Any, second: Any) -> Any:
            return loss_fn(_zipped(first, second), *rest)

        first, second = params[::2], params[1::2]
        (loss, aux), grads = jax.value_and_grad(of_first, has_aux=True)(first, second)
        if not second:
            return (loss, aux), grads
        moved = [p + 1.0 for p in first]
        others, _ = jax.grad(lambda s: of_first(moved, s), has_aux=True)(second)
        return (loss, aux), _zipped(grads, others)

    return run


def _zipped(first: Any, second: Any) -> list[Any]:
    out = [x for pair in zip(first, second, strict=False) for x in pair]
    return out + first[len(second) :]


def _inner(loss_fn: Step) -> Step:
    """Of a loss that holds its own gradient in the first leaf of the batch."""

    def penalized(params: Any, state: Any, key: Any, rows: Any) -> Any:
        def of_rows(x: Any) -> Any:
            return loss_fn(params, state, key, [x, *rows[1:]])

        slope, (loss, aux) = _grad_and_value(of_rows)(rows[0])
        return loss + jnp.mean(jnp.tanh(slope / 8) ** 2), aux

    return jax.value_and_grad(penalized, has_aux=True)


def _grad_and_value(f: Step) -> Step:
    def run(x: Any) -> Any:
        out, slope = jax.value_and_grad(f, has_aux=True)(x)
        return slope, out

    return run


def _unrolled(loss_fn: Step) -> Step:
    """Of the loss behind one update, through that update."""

    def behind(params: Any, *rest: Any) -> Any:
        grads, _ = jax.grad(loss_fn, has_aux=True)(params, *rest)
        moved = [p - 0.125 * jnp.tanh(g) for p, g in zip(params, grads, strict=True)]
        return loss_fn(moved, *rest)

    return jax.value_and_grad(behind, has_aux=True)


GRADS = {"one": _one, "two": _two, "inner": _inner, "unrolled": _unrolled}


def update(optimizer: str, params: Any, grads: Any, opt: Any) -> tuple[Any, Any]:
    """New parameters and moments. Adam's epsilon is large: rounding has to stay so."""
    if optimizer == "sgd":
        return [p - LEARNING_RATE * g for p, g in zip(params, grads, strict=True)], opt
    if optimizer == "momentum":
        opt = [0.5 * m + g for m, g in zip(opt, grads, strict=True)]
        return [p - LEARNING_RATE * m for p, m in zip(params, opt, strict=True)], opt
    moments = [
        (0.5 * m + 0.5 * g, 0.5 * v + 0.5 * g * g)
        for (m, v), g in zip(opt, grads, strict=True)
    ]
    moves = [m / (jnp.sqrt(v + 1e-2)) for m, v in moments]
    if optimizer == "lamb":
        moves = [
            u * (jnp.linalg.norm(p) + 1) / (jnp.linalg.norm(u) + 1)
            for p, u in zip(params, moves, strict=True)
        ]
    return [p - LEARNING_RATE * u for p, u in zip(params, moves, strict=True)], moments


# Forms


@dataclass(frozen=True)
class Form:
    """How users write a step's arguments and results.

    Attributes:
      write: the step in this form, from `(state, batch) -> (state, metrics)`.
      args: its arguments, from the state and batch.
      read: the state and metrics, from its results.
      keep: what it keeps of them.
      options: arguments of `fully_shard` that it needs.
    """

    write: Callable[[Step], Step] = lambda step: step
    args: Callable[[Any, Any], tuple[Any, ...]] = lambda state, batch: (state, batch)
    read: Callable[[Any], tuple[Any, Any]] = lambda out: out
    keep: Callable[[Any], tuple[Any, Any]] = lambda out: out
    options: dict[str, Any] = field(default_factory=dict)


def _second(step: Step) -> Step:
    return lambda batch, state: step(state, batch)


PARTS = ("params", "opt", "counts", "key")


def _several(step: Step) -> Step:
    def run(params: Any, opt: Any, counts: Any, key: Any, batch: Any) -> Any:
        state = {"params": params, "opt": opt, "counts": counts, "key": key}
        new, metrics = step(state, batch)
        return *(new[part] for part in PARTS), metrics

    return run


REST = PARTS[1:]


def _loss_first(step: Step) -> Step:
    """Takes the batch between the parameters and the rest; returns the loss first."""

    def run(params: Any, batch: Any, rest: Any) -> Any:
        new, metrics = step({"params": params, **rest}, batch)
        return metrics, new["params"], {part: new[part] for part in REST}

    return run


def _alone(step: Step) -> Step:
    return lambda batch, state: step(state, batch)[0]


FORMS = {
    "state": Form(),
    "second": Form(_second, lambda s, b: (b, s), options={"state_argnums": 1}),
    "several": Form(
        _several,
        lambda s, b: (*(s[part] for part in PARTS), b),
        lambda out: (dict(zip(PARTS, out[:4], strict=True)), out[4]),
        options={"state_argnums": (0, 1, 2, 3)},
    ),
    "found second": Form(_second, lambda s, b: (b, s)),
    "loss first": Form(
        _loss_first,
        lambda s, b: (s["params"], b, {part: s[part] for part in REST}),
        lambda out: ({"params": out[1], **out[2]}, out[0]),
    ),
    "alone": Form(
        _alone,
        lambda s, b: (b, s),
        lambda out: (out, None),
        lambda out: (out[0], None),
    ),
}


def batch_spec(program: Program) -> Any:
    """Rows are split; the teacher that `alias="batch"` asks for is on every device."""
    return {"rows": None, "teacher": PartitionSpec()} if _has_teacher(program) else None


def _has_teacher(program: Program) -> bool:
    return program.alias == "batch"


# Data


def make_state(program: Program) -> Any:
    """The first state: small integers."""
    rng = np.random.default_rng(1)
    params = [_data(rng, t) for t in program.params]
    zeros = [np.zeros(t.shape, np.float32) for t in program.params]
    opt: Any = {"sgd": [], "momentum": zeros}.get(
        program.optimizer, [(z, z) for z in zeros]
    )
    counts = [_data(rng, t) for t in program.counts]
    return {"params": params, "opt": opt, "counts": counts, "key": jax.random.key(3)}


def make_batch(program: Program, seed: int, state: Any) -> dict[str, Any]:
    """Rows, and the parameters of `state` as a teacher if the program has one."""
    rng = np.random.default_rng(100 + seed)
    batch: dict[str, Any] = {"rows": [_data(rng, t) for t in program.batch]}
    if _has_teacher(program):
        batch["teacher"] = list(state["params"])
    return batch


def _data(rng: np.random.Generator, type_: Type) -> np.ndarray:
    """Small integers, of one sign in two of three float leaves: a zero that is not
    theirs then shows. Of narrow dtypes, any in half of the elements."""
    dtype = np.dtype(DTYPES[type_.dtype])
    if type_.dtype == "b":
        return rng.integers(0, 2, type_.shape).astype(bool)
    if type_.dtype in "fi":
        ranges = [(0, 3)] if type_.dtype == "i" else [(-2, 3), (1, 4), (-3, 0)]
        low, high = ranges[rng.integers(len(ranges))]
        return rng.integers(low, high, type_.shape).astype(dtype)
    ends = np.iinfo(dtype)
    any_ = rng.integers(ends.min, ends.max, type_.shape, endpoint=True)
    small = rng.integers(0, 8, type_.shape)
    return np.where(rng.integers(0, 2, type_.shape), any_, small).astype(dtype)
