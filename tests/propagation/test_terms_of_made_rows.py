"""In: steps whose losses have terms of the batch and of rows that they make themselves,
as a GAN's. Out: gradients of both are added before they are summed over devices.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from plan_helpers import GATHERS, assert_steps_alike, cpu_mesh

import shardfn
from shardfn._lowering import choose_generated
from shardfn._propagation import rounds

ROWS, WIDTH = 16, 24


def judged(p: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(jnp.tanh(x @ p["first"] + p["bias"]) @ p["last"])


def gan(state: Any, x: jax.Array) -> Any:
    """A discriminator's step, with momentum."""
    key, noise = jax.random.split(state["key"])
    made = jnp.tanh(jax.random.normal(noise, (ROWS, WIDTH)) @ state["generator"])

    def loss_fn(p: Any) -> jax.Array:
        real, other = jax.nn.softplus(-judged(p, x)), jax.nn.softplus(judged(p, made))
        return jnp.mean(real) + jnp.mean(other)

    loss, grads = jax.value_and_grad(loss_fn)(state["p"])
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mean"], grads)
    p = jax.tree.map(lambda w, m: w - 0.5 * m, state["p"], mean)
    return state | {"key": key, "p": p, "mean": mean}, loss


def arguments() -> tuple[Any, jax.Array]:
    shapes = {"first": (WIDTH, 40), "bias": (40,), "last": (40, 8)}
    keys = jax.random.split(jax.random.key(0), 5)
    made = zip(keys, shapes.items(), strict=False)
    p = {name: jax.random.normal(key, shape) / 5 for key, (name, shape) in made}
    state = {
        "p": p,
        "mean": jax.tree.map(jnp.zeros_like, p),
        "generator": jax.random.normal(keys[3], (WIDTH, WIDTH)) / 5,
        "key": jax.random.key(1),
    }
    return state, jax.random.normal(keys[4], (ROWS, WIDTH))


def sums() -> list[tuple[str, str]]:
    """Those of gradients; small leaves are whole on every device."""
    step = shardfn.fully_shard(gan, cpu_mesh(8), min_size=600, **GATHERS)
    lines = step.plan(*arguments()).collectives
    return sorted(
        (c.path, c.op) for c in lines if c.path.startswith("p/") and c.reduces
    )


def test_terms_of_a_gradient_are_added_before_they_are_summed() -> None:
    assert sums() == [
        ("p/bias", "all_reduce"),
        ("p/first", "psum_scatter"),
        ("p/last", "all_reduce"),
    ]


def test_the_first_rounds_alone_sum_some_of_them_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rounds.Rounds, "price", lambda self, solved: 0)
    monkeypatch.setattr(choose_generated, "GENERATED_FLOPS", 2**60)  # else it helps
    assert len(sums()) > 3


def clipped(w: jax.Array, x: jax.Array) -> Any:
    """A step along a gradient or, where it is too long, along a part of it."""
    noise = jax.random.normal(jax.random.key(0), (ROWS, WIDTH))
    loss, g = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh((x + noise) @ w)))(w)
    norm = jnp.sqrt(jnp.sum(g**2))
    return w - jnp.where(norm < 0.01, g, g / norm), loss


@pytest.mark.parametrize("step", [gan, clipped])
def test_shardings_are_searched_again_only_for_sums_of_different_things(
    step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient that is selected from itself and a part of it is one sum."""
    found, could_join = list[bool](), rounds.Rounds.could_join

    def note(self: Any, early: Any) -> bool:
        found.append(could_join(self, early))
        return found[-1]

    monkeypatch.setattr(rounds.Rounds, "could_join", note)
    state, x = arguments()
    given = state if step is gan else state["p"]["first"]
    shardfn.fully_shard(step, cpu_mesh(8), min_size=600, **GATHERS).plan(given, x)
    assert found
    assert any(found) == (step is gan)


def test_steps_are_those_of_the_plain_step() -> None:
    step = shardfn.fully_shard(gan, cpu_mesh(8), min_size=600, **GATHERS)
    assert_steps_alike(gan, step, *arguments(), steps=3)
