"""In: steps. Out: each gradient is named after the leaf that it updates, and values
that join leaves after all of them: by what becomes of them, never by their size.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from sharded_and_plain import make_mesh

import shardfn
from shardfn._core.leaves import names_text

WIDTH = 8
X = np.ones((8, WIDTH), np.float32)  # as many rows as columns: all sizes are equal
SQUARE = np.eye(WIDTH, dtype=np.float32)


def scattered(step: Callable, state, **options) -> set[str]:
    """The leaves whose gradients are reduced, as the plan names them."""
    sharded = shardfn.fully_shard(step, make_mesh("4"), min_size=2, **options)
    lines = sharded.plan(state, X).collectives
    return {c.path for c in lines if c.phase == "backward" and c.shape}


def gathered(step: Callable, state) -> set[str]:
    sharded = shardfn.fully_shard(step, make_mesh("4"), min_size=2)
    return {c.path for c in sharded.plan(state, X).collectives if c.op == "all_gather"}


def deep(params, x):
    for w in jax.tree.leaves(params):
        x = jnp.tanh(x @ w)
    return (x**2).sum()


def plain(state, x):
    g = jax.grad(deep)(state["w"], x)
    return {**state, "w": jax.tree.map(lambda w, g: w - 0.1 * g, state["w"], g)}, ()


def with_momentum(state, x):
    """The state's leaves all have one shape, and so have all activations."""
    g = jax.grad(deep)(state["w"], x)
    m = jax.tree.map(lambda m, g: 0.9 * m + g, state["m"], g)
    w = jax.tree.map(lambda w, m: w - 0.1 * m, state["w"], m)
    return {"m": m, "w": w}, ()


def signed(state, x):
    """Nothing is linear in the gradient but the momentum."""
    g = jax.grad(deep)(state["w"], x)
    w = jax.tree.map(lambda w, g: w - 0.1 * jnp.sign(g), state["w"], g)
    m = jax.tree.map(lambda m, g: 0.9 * m + g, state["m"], g)
    return {"m": m, "w": w}, ()


def preconditioned(state, x):
    """The gradient meets the weights in a product."""
    g = jax.grad(deep)(state["w"], x)
    m = jax.tree.map(lambda m, g: m + g @ g.T, state["m"], g)
    w = jax.tree.map(lambda w, m, g: w - 0.1 * m @ g, state["w"], m, g)
    return {"m": m, "w": w}, ()


def clipped(state, x):
    """The norm of all gradients scales each of them."""
    g = jax.grad(deep)(state["w"], x)
    norm = jnp.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(g)))
    w = jax.tree.map(lambda w, g: w - 0.1 * g / norm, state["w"], g)
    return {**state, "w": w}, ()


def branched(state, x):
    """The update is one branch."""
    g = jax.grad(deep)(state["w"], x)
    new = jax.tree.map(lambda w, g: w - 0.1 * g, state["w"], g)
    keep, move = lambda: state["w"], lambda: new
    return {**state, "w": lax.cond(jnp.isfinite(g["a"]).all(), move, keep)}, ()


def looped(state, x):
    """The update is what a loop makes of the gradient."""
    g = jax.grad(deep)(state["w"], x)
    halve = lambda g: lax.fori_loop(0, 3, lambda _, g: g * 0.5, g)  # noqa: E731
    w = jax.tree.map(lambda w, g: w - halve(g), state["w"], g)
    return {**state, "w": w}, ()


UPDATES = [plain, with_momentum, signed, preconditioned, clipped, branched, looped]


@pytest.mark.parametrize("step", UPDATES)
def test_a_gradient_is_named_after_what_it_updates(step: Callable) -> None:
    state = {
        kind: {leaf: SQUARE * scale for leaf, scale in (("a", 1), ("b", 2))}
        for kind in "mw"
    }
    assert scattered(step, state) == {"w/a", "w/b"}


def test_a_scalar_s_gradient_is_its_own() -> None:
    """A scalar has no dimensions to tell it by: the norm that scales its update, and
    everyone's, is not it."""

    def step(state, x):
        def loss(state):
            return (jnp.tanh(x @ state["w"] * state["heat"]) ** 2).sum()

        g = jax.grad(loss)(state)
        norm = jnp.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(g)))
        return jax.tree.map(lambda w, g: w - g / norm, state, g), ()

    state = {"heat": np.float32(1), "w": SQUARE}
    sharded = shardfn.fully_shard(step, make_mesh("4"), min_size=2)
    scalars = [c for c in sharded.plan(state, X).collectives if not c.shape]
    assert {(c.phase, c.path) for c in scalars} == {
        ("backward", "heat"),
        ("update", ""),
    }


# Values that join leaves


def stacked(names: list[str]) -> tuple[Callable, dict]:
    """Layers with leaves of their own, stacked within the step for a scan."""

    def step(state, x):
        def loss(state):
            layers = jnp.stack([state[name]["w"] for name in names])
            return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, layers)[0].sum()

        g = jax.grad(loss)(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, g), ()

    return step, {name: {"w": SQUARE} for name in names}


def test_layers_stacked_within_the_step_keep_their_names() -> None:
    step, state = stacked(["0", "1", "2"])
    assert gathered(step, state) == scattered(step, state) == {"{0, 1, 2}/w"}
    step, state = stacked([str(i) for i in range(6)])
    assert gathered(step, state) == scattered(step, state) == {"*/w"}


def test_joined_leaves_are_asked_for_what_all_of_them_are() -> None:
    """An option that only some of them have is not theirs together."""
    step, state = stacked(["0", "1", "2"])

    def dtypes(choice) -> set[str]:
        sharded = shardfn.fully_shard(
            step, make_mesh("4"), min_size=2, gather_dtype=choice
        )
        lines = sharded.plan(state, X).collectives
        return {c.dtype for c in lines if c.op == "all_gather"}

    assert dtypes({"*/w": "bfloat16"}) == {"bfloat16"}
    assert dtypes({"0/w": "bfloat16"}) == {"float32"}


def test_matrices_that_are_joined_have_both_names() -> None:
    def step(state, x):
        def loss(state):
            both = jnp.concatenate([state["q"], state["k"]], axis=1)
            q, k = jnp.split(x @ both, 2, axis=1)
            return (q * k).sum()

        g = jax.grad(loss)(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, g), ()

    state = {"q": SQUARE, "k": SQUARE}
    assert gathered(step, state) == scattered(step, state) == {"{k, q}"}


@pytest.mark.parametrize(
    "names, text",
    [
        ((), ""),
        (("a/w",), "a/w"),
        (("a/w", "a/b"), "a/{w, b}"),
        (("l/0/w", "l/1/w"), "l/{0, 1}/w"),
        (tuple(f"l/{i}/w" for i in range(9)), "l/*/w"),
        (("a/w", "b/c/d"), "{a/w, b/c/d}"),
        (
            tuple(f"a/{i}/" + "w/" * i for i in range(6)),
            "a/{0/, 1/w/, 2/w/w/, 3/w/w/w/, 2 more}",
        ),
    ],
)
def test_names_are_written_short(names: tuple[str, ...], text: str) -> None:
    assert names_text(names) == text
