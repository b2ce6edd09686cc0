"""In: steps whose parameters are gathered in eight bits, with every option that says
where, when and with what they move. Out: to the last bit what the same step does whose
author rounds these parameters, with exact moves, or nearly where sums reorder.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layered import STATE, UNROLLED, WIDTH, descent, layered_loss
from plan_helpers import Sharded, cpu_mesh, run, shard_fn

BLOCK = 4
TIED = {"table": (16, 32), "out": (32, 32)}
Rounds = Callable[[Any, str], Any]
"""What a step does to a parameter of this name before it uses it."""


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def rounded(x: Any, dim: int) -> Any:
    """`x` in int8 and back, with the derivative of `x`."""
    rows = jnp.moveaxis(x.astype(jnp.float32), dim, -1)
    blocks = rows.reshape(*rows.shape[:-1], -1, BLOCK)
    scale = (jnp.abs(blocks).max(-1, keepdims=True) / 127).astype(jnp.bfloat16)
    scale = scale.astype(jnp.float32)
    parts = jnp.clip(jnp.round(jnp.where(scale > 0, blocks / scale, 0)), -127, 127)
    return jnp.moveaxis((parts * scale).reshape(rows.shape), -1, dim).astype(x.dtype)


@rounded.defjvp
def _straight_through(dim: int, primals: Any, tangents: Any) -> Any:
    return rounded(*primals, dim), tangents[0]


def layers(rounds: Rounds, kind: str = "scan_remat", microbatches: int = 1) -> Any:
    def layer(h, w):
        return h + jnp.tanh(h @ rounds(w["up"], "up")) @ rounds(w["down"], "down")

    def head(state, h):
        return h @ rounds(state["head"], "head")

    return descent(layered_loss(kind, layer, head), microbatches, rate=0.125)


def tied(rounds: Rounds) -> Any:
    """A table that is looked up, and the head."""

    def loss_fn(state, x):
        table = rounds(state["table"], "table")
        ids = jnp.abs(x * 100).astype(jnp.int32) % 16
        h = jnp.tanh(table[ids].mean(axis=1) @ rounds(state["out"], "out"))
        return ((h @ table.T) ** 2).mean()

    return descent(loss_fn, rate=0.125)


SCAN = layers, STATE
LOOSE = functools.partial(layers, kind="unrolled"), UNROLLED
TWICE = functools.partial(layers, microbatches=2), STATE
COMPOSITIONS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "alone": (*SCAN, {}),
    "together": (*SCAN, {"bucket_bytes": 2**20}),
    "ahead and together": (*LOOSE, {"prefetch": 1, "bucket_bytes": 2**20}),
    "kept": (*SCAN, {"reshard_after_forward": False}),
    "kept within groups": (*SCAN, {"reshard_after_forward": 2, "prefetch": 1}),
    "one stays": (*SCAN, {"stationary": {"head": True, "*": False}}),
    "tied": (tied, TIED, {}),
    "accumulated": (*TWICE, {"accumulate": "defer", "prefetch": 1}),
    "on the host": (*SCAN, {"offload": {"layers/*": "host"}}),
}

BOUNDS = {"one stays": 1e-3, "tied": 1e-7}
"""How far elements may be off: where a weight meets what stays it is not rounded, and
sums of bfloat16 reorder; a table's sums of float32 reorder."""


def case(make: Any, shapes: Any, rounds: Rounds, **options: Any) -> Sharded:
    exact = {"xla_allow_excess_precision": False}
    options |= {"compiler_options": exact}
    return shard_fn(make(rounds), cpu_mesh(4), shapes, (16, WIDTH), **options)


@functools.cache
def by_hand(name: str, dims: tuple[tuple[str, int], ...]) -> Any:
    """Runs of the step that rounds by itself."""
    make, shapes, options = COMPOSITIONS[name]
    known = dict(dims)
    rounds = lambda w, leaf: rounded(w, known[leaf]) if leaf in known else w  # noqa: E731
    sums = {k: v for k, v in options.items() if k in ("accumulate", "stationary")}
    return run(case(make, shapes, rounds, **sums))


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_compositions_round_as_a_step_that_rounds(name: str) -> None:
    make, shapes, options = COMPOSITIONS[name]
    flat, _ = jax.tree.flatten_with_path(shapes, is_leaf=lambda x: isinstance(x, tuple))
    paths = [jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in flat]
    asked = dict(gather_dtype=dict.fromkeys(paths, "int8"), quantize_block=BLOCK)
    quantized = case(make, shapes, lambda w, leaf: w, **asked, **options)
    dims = {}
    for path in paths:
        text = quantized.plan.explain(path)
        if found := re.search(rf"to int8, {BLOCK} along dimension (\d)", text):
            dims[path.rpartition("/")[2]] = int(found[1])
    stays = {"head"} if name == "one stays" else set()
    assert dims.keys() == {path.rpartition("/")[2] for path in paths} - stays
    first = next(n for n, c in COMPOSITIONS.items() if c[:2] == (make, shapes))
    alike = name if {"accumulate", "stationary"} & options.keys() else first
    expected = by_hand(alike, tuple(dims.items()))
    for ours, theirs in zip(run(quantized), expected, strict=True):
        for a, b in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=BOUNDS.get(name, 0))
