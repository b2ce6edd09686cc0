"""A small model on 8 CPU devices, really run; seconds per step of each program, out.

Programs take turns, so that a busy machine slows all of them, in rounds whose order
alternates. What is compared is the median over rounds of the ratio within one.
"""

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import criteria_programs as programs
import jax
import jax.numpy as jnp
import numpy as np
from criteria_cases import RUN, Model
from criteria_measure import BASELINES
from jax.sharding import AxisType

ROUNDS = 45

Step = Callable[[Any, Any], tuple[Any, Any]]


def values(model: Model, devices: int) -> tuple[Any, Any]:
    """A state and a batch of pseudo-random numbers."""
    random = np.random.default_rng(0)
    state, batch = programs.arguments(model, devices)
    params = jax.tree.map(
        lambda x: random.normal(0, 0.02, x.shape).astype(x.dtype), state["params"]
    )
    tokens = jax.tree.map(
        lambda x: random.integers(model.vocabulary, size=x.shape, dtype=x.dtype), batch
    )
    return {"params": params, "opt": programs.ADAMW.init(params)}, tokens


def prepared(name: str, model: Model, mesh: Any) -> tuple[Step, Any, Any]:
    """A compiled step, its state and its batch as it stores them."""
    state, batch = values(model, mesh.size)
    if name == "shardfn":
        step = programs.sharded(model, mesh)
        state = step.shard(state)
        return step, state, batch
    lower, _ = BASELINES[name]
    compiled = lower(model, mesh).compile()
    stored, split = compiled.input_shardings[0]
    return compiled, jax.device_put(state, stored), jax.device_put(batch, split)


def one_step(step: Step, state: Any, batch: Any) -> tuple[Any, float, float]:
    start = time.perf_counter()
    state, loss = jax.block_until_ready(step(state, batch))
    return state, time.perf_counter() - start, float(jnp.float32(loss))


def run() -> dict[str, Any]:
    """Seconds per step of every program, by round, and the losses that they reach."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    names = ["shardfn", *(n for n in BASELINES if "collective matmul" not in n)]
    ready = {name: prepared(name, RUN, mesh) for name in names}
    rounds: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, float] = {}
    for at in range(ROUNDS + 1):
        for name in names if at % 2 else reversed(names):
            step, state, batch = ready[name]
            state, took, losses[name] = one_step(step, state, batch)
            ready[name] = step, state, batch
            if at:
                rounds[name].append(took)
    ratios = {
        name: statistics.median(
            a / b for a, b in zip(rounds["shardfn"], rounds[name], strict=True)
        )
        for name in names
    }
    medians = {name: statistics.median(took) for name, took in rounds.items()}
    return {
        "jax": jax.__version__,
        "rounds": ROUNDS,
        "seconds": medians,
        "ratios": ratios,
        "losses": losses,
    }
