"""A transformer's loop over layers whose first gathers run ahead, on CPU devices that
are taken for GPUs of two hosts; and what its plan says of that.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from plan_helpers import Sharded, cpu_mesh, shard_fn

from shardfn._core import compat
from shardfn._core.plan import Apply, BodyPlan, Reshard
from shardfn._core.program import Program
from shardfn._schedule import (
    balanced_loops,
    coming_gathers,
    first_gathers,
    first_uses,
    undelayed_sums,
)
from shardfn.storage import _stored_layout

LAYERS, WIDTH, WIDE = 5, 32, 128
AHEAD = {"scale", "q", "k", "v", "o", "bias"}
"""What comes before the largest, and what is small."""


def layer(h: jax.Array, w: Any) -> tuple[jax.Array, None]:
    """As a transformer's: products of one operand, of theirs, and the two widest."""
    w = {name: x.astype(h.dtype) for name, x in w.items()}
    y = h * w["scale"]
    q, k, v = (y @ w[name] for name in "qkv")
    h = h + (jnp.tanh(q * k) + v) @ w["o"]
    return h + jnp.tanh(h @ w["up"] + w["bias"]) @ w["down"], None


def state_of(width: int = WIDTH, wide: int = WIDE) -> dict[str, tuple[int, ...]]:
    square = dict.fromkeys("qkvo", (LAYERS, width, width))
    wides = {"up": (LAYERS, width, wide), "down": (LAYERS, wide, width)}
    return {**square, **wides, "scale": (LAYERS, width), "bias": (LAYERS, wide)}


def plain_step(remat: bool = True, dtype: Any = jnp.float32):
    body = jax.checkpoint(layer, prevent_cse=False) if remat else layer

    def step(state, x):
        def loss_fn(state):
            h, _ = lax.scan(body, x.astype(dtype), state)
            return jnp.mean(h.astype(jnp.float32) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), loss

    return step


@contextmanager
def in_turn(balanced: bool, least_part: int = 1) -> Iterator[None]:
    """Takes CPU devices for GPUs of two hosts, and any loop for one that is balanced,
    or that computes for longer than it sends. It goes in turn if what it sends is of
    parts of so many bytes."""
    most = 10**9 if balanced else 0
    sums: dict[str, Any] = {"SUMS_FLOPS": most, "SUMS_PART": least_part}
    least: dict[str, Any] = {
        "BALANCED_FLOPS": 0,
        "BALANCED_BYTES": 1,
        "BALANCED_SHARE": 1,
    }
    with (
        mock.patch.object(compat, "misjudges_network", lambda device: balanced),
        mock.patch.object(compat, "hides_network", lambda device: True),
        mock.patch.object(_stored_layout, "slices_of", lambda devices: 2),
        mock.patch.multiple(balanced_loops, **sums, **least),
        mock.patch.multiple(undelayed_sums, **sums),
        mock.patch.object(first_uses, "CHAINED_BYTES", 2 * WIDTH * WIDTH),
        mock.patch.object(first_gathers, "CHAINED_BYTES", 2 * WIDTH * WIDTH),
        mock.patch.object(coming_gathers, "CHAINED_BYTES", 2 * WIDTH * WIDTH),
    ):
        yield


def sharded(remat: bool = True, rows: int = 64, devices: int = 8, **options) -> Sharded:
    options = {"stationary": False} | options
    step = plain_step(remat, options.pop("dtype", jnp.float32))
    return shard_fn(step, cpu_mesh(devices), state_of(), (rows, WIDTH), **options)


def loops(case: Sharded) -> list[tuple[Program, Apply]]:
    """The loops of a plan, in order, with the program of their body."""
    states, batch = case.step._divide((case.state, case.batch), {})
    planned = case.step.programs.planned(*case.step.storage.leaves(states), batch)
    nodes = planned.program.nodes
    return [
        (nodes[step.node].bodies[0], step)
        for step in planned.body.steps
        if isinstance(step, Apply) and nodes[step.node].kind == "scan"
    ]


def gathered_in(program: Program, body: BodyPlan) -> Iterator[str]:
    """The leaves that a body, and calls in it, gather."""
    for step in body.steps:
        if isinstance(step, Reshard):
            if step.gathers_state:
                yield program.leaf(step.source.value)[0]
        elif (node := program.nodes[step.node]).is_call:
            yield from gathered_in(node.bodies[0], step.bodies[0])


def ahead_of(program: Program, loop: Apply) -> set[str]:
    return {name for part in loop.ahead for name in gathered_in(program, part.part)}


def values(rows: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    state = {
        k: (rng.standard_normal(shape) / 7).astype(np.float32)
        for k, shape in state_of().items()
    }
    return state, rng.standard_normal((rows, WIDTH)).astype(np.float32)
