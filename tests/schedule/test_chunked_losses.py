"""In: losses over chunks of the tokens, whose loop shares a head that is large. Out:
the head is gathered for all chunks and its gradient summed once; as the plain step.
"""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from plan_helpers import GATHERS, assert_steps_alike, cpu_mesh

import shardfn
from shardfn._lowering import choose_loops
from shardfn._propagation import loop_carries
from shardfn._schedule import loop_invariants

ROWS, TOKENS, WIDTH, VOCABULARY, CHUNKS = 8, 12, 20, 37, 4
SHAPES = {
    "table": (VOCABULARY, WIDTH),
    "norm": (WIDTH,),
    "head": (WIDTH, VOCABULARY),
}


def entropy(x: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
    """Sum of cross-entropies, in float32."""
    logits = (x @ head.astype(x.dtype)).astype(jnp.float32)
    hit = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.sum(jax.nn.logsumexp(logits, axis=-1) - hit)


def normed(x: jax.Array, p: Any, targets: jax.Array) -> jax.Array:
    """The same behind a norm whose scale is used in each chunk, too."""
    return entropy(x * p["norm"].astype(x.dtype), p["head"], targets)


def chunked(x: jax.Array) -> jax.Array:
    return jnp.moveaxis(x.reshape(ROWS, CHUNKS, -1, *x.shape[2:]), 1, 0)


def scanned(p: Any, x: jax.Array, targets: jax.Array) -> jax.Array:
    @jax.checkpoint
    def add(total: jax.Array, chunk: Any) -> Any:
        return total + normed(chunk[0], p, chunk[1]), None

    return lax.scan(add, jnp.float32(0), (chunked(x), chunked(targets)))[0]


def cast_outside(p: Any, x: jax.Array, targets: jax.Array) -> jax.Array:
    return scanned(jax.tree.map(lambda w: w.astype(x.dtype), p), x, targets)


def kept(p: Any, x: jax.Array, targets: jax.Array) -> jax.Array:
    """Without remat: the backward pass reads the logits of all chunks."""

    def add(total: jax.Array, chunk: Any) -> Any:
        return total + normed(chunk[0], p, chunk[1]), None

    return lax.scan(add, jnp.float32(0), (chunked(x), chunked(targets)))[0]


def mapped(p: Any, x: jax.Array, targets: jax.Array) -> jax.Array:
    one = jax.checkpoint(lambda chunk: normed(chunk[0], p, chunk[1]))
    return lax.map(one, (chunked(x), chunked(targets))).sum()


def unrolled(p: Any, x: jax.Array, targets: jax.Array) -> jax.Array:
    one = jax.checkpoint(normed)
    chunks = zip(chunked(x), chunked(targets), strict=True)
    return sum((one(x, p, y) for x, y in chunks), jnp.float32(0))


def flat(p: Any, x: jax.Array, targets: jax.Array) -> jax.Array:
    """Tokens of all rows in chunks."""

    @jax.checkpoint
    def add(total: jax.Array, chunk: Any) -> Any:
        return total + normed(chunk[0], p, chunk[1]), None

    chunks = x.reshape(CHUNKS, -1, WIDTH), targets.reshape(CHUNKS, -1)
    return lax.scan(add, jnp.float32(0), chunks)[0]


@jax.custom_vjp
def fused(p: Any, x: jax.Array, targets: jax.Array) -> jax.Array:
    return fused_forward(p, x, targets)[0]


def fused_forward(p: Any, x: jax.Array, targets: jax.Array) -> Any:
    """Gradients of a chunk are computed beside its loss."""

    def add(carry: Any, chunk: Any) -> Any:
        loss, (dx, dp) = jax.value_and_grad(normed, argnums=(0, 1))(
            chunk[0], p, chunk[1]
        )
        return jax.tree.map(jnp.add, carry, (loss, dp)), dx

    zero = jnp.float32(0), jax.tree.map(jnp.zeros_like, p)
    (loss, dp), dx = lax.scan(add, zero, (chunked(x), chunked(targets)))
    return loss, (dp, jnp.moveaxis(dx, 0, 1).reshape(x.shape))


def fused_backward(saved: Any, given: jax.Array) -> Any:
    return *jax.tree.map(lambda x: given.astype(x.dtype) * x, saved), None


fused.defvjp(fused_forward, fused_backward)

LOSSES = [scanned, cast_outside, kept, mapped, unrolled, flat, fused]


def make_step(loss: Any, dtype: Any) -> Any:
    def loss_fn(p: Any, batch: Any) -> jax.Array:
        x = jnp.tanh(p["table"][batch["inputs"]]).astype(dtype)
        rest = {"norm": p["norm"], "head": p["head"]}
        return loss(rest, x, batch["targets"]) / batch["targets"].size

    def train_step(p: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(p, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), loss

    return train_step


def arguments() -> Any:
    rng = np.random.default_rng(0)
    p = {k: jnp.asarray(rng.normal(size=s) / 9, jnp.float32) for k, s in SHAPES.items()}
    tokens = rng.integers(0, VOCABULARY, (ROWS, TOKENS + 1))
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    return p, jax.tree.map(lambda x: jnp.asarray(x, jnp.int32), batch)


def sharded(loss: Any, *sizes: int, dtype: Any = jnp.bfloat16, **options: Any) -> Any:
    """The step, and what it takes."""
    axis = ("replica", "data") if len(sizes) > 1 else "data"
    options = GATHERS | {"min_size": 8, "axis": axis} | options
    step = shardfn.fully_shard(make_step(loss, dtype), cpu_mesh(*sizes), **options)
    return step, *arguments()


def moves(plan: shardfn.Plan, *leaves: str) -> dict[str, int]:
    """How often a step moves these leaves or their gradients, by operation."""
    found: Counter[str] = Counter()
    for line in plan.collectives:
        if line.path in leaves and line.shape and len(line.shape) == 2:
            found[line.op] += line.times or 0
    return dict(found)


@pytest.fixture
def all_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is what a loss and the norm's scale take: a head is far above it."""
    for module in (loop_carries, loop_invariants):
        monkeypatch.setattr(module, "LOOP_BYTES", 4 + WIDTH * 4)
    monkeypatch.setattr(choose_loops, "LOOP_MOST", 0)


ONCE = {"all_gather": 1, "psum_scatter": 1}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_head_moves_once_for_all_chunks(loss: Any, all_is_large: None) -> None:
    """A gradient that a forward pass has made has no name."""
    step, p, batch = sharded(loss, 4)
    plan = step.plan(p, batch)
    assert moves(plan, "head", *([""] if loss is fused else [])) == ONCE


@pytest.mark.covering(2)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("sizes", [(8,), (2, 4)], ids=str)
@pytest.mark.parametrize("dtype, tol", [(jnp.float32, 1e-4), (jnp.bfloat16, 2e-2)])
def test_steps_are_those_of_the_plain_step(
    loss: Any, sizes: Any, dtype: Any, tol: float, all_is_large: None
) -> None:
    step, p, batch = sharded(loss, *sizes, dtype=dtype)
    assert_steps_alike(make_step(loss, dtype), step, p, batch, tol=tol)


@pytest.mark.parametrize("loss", [scanned, fused])
def test_what_is_compiled_is_what_is_planned(loss: Any, all_is_large: None) -> None:
    step, p, batch = sharded(loss, 4)
    compiled = step.lower(p, batch).compile()
    assert step.plan(p, batch).verify(compiled).ok


@pytest.mark.parametrize("loss", [scanned, mapped])
def test_options_say_otherwise(loss: Any, all_is_large: None) -> None:
    step, p, batch = sharded(loss, 4, accumulate={"head": "scatter"})
    assert moves(step.plan(p, batch), "head") == ONCE | {"psum_scatter": CHUNKS}


def test_two_heads_stay_in_the_loop(all_is_large: None) -> None:
    """An iteration needs one after the other, and would hold both."""

    def both(p: Any, x: jax.Array, targets: jax.Array) -> jax.Array:
        second = {"norm": p["norm"], "head": p["second"]}
        return scanned_together([p, second], x, targets)

    def scanned_together(heads: Any, x: jax.Array, targets: jax.Array) -> jax.Array:
        @jax.checkpoint
        def add(total: jax.Array, chunk: Any) -> Any:
            return total + sum(normed(chunk[0], p, chunk[1]) for p in heads), None

        return lax.scan(add, jnp.float32(0), (chunked(x), chunked(targets)))[0]

    def train_step(p: Any, batch: Any) -> Any:
        def loss_fn(p: Any) -> jax.Array:
            return both(p, jnp.tanh(p["table"][batch["inputs"]]), batch["targets"])

        loss, grads = jax.value_and_grad(loss_fn)(p)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), loss

    p, batch = arguments()
    p["second"] = 2 * p["head"]
    step = shardfn.fully_shard(train_step, cpu_mesh(4), min_size=8, **GATHERS)
    plan = step.plan(p, batch)
    assert moves(plan, "head") == moves(plan, "second")
    assert moves(plan, "head")["all_gather"] == 2 * CHUNKS
    assert moves(plan, "head")["psum_scatter"] == CHUNKS
    assert "more than 84 B" in plan.explain("head")
