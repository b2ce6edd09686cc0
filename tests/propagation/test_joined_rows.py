"""In: steps that join arrays of as many rows of the batch, such as two views, or the
rows of several groups. Out: the plain step's values; devices exchange blocks of rows,
and have none whole, whatever other dimensions the rows have.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from plan_helpers import GATHERS, assert_steps_alike, cpu_mesh
from tiers import exhaustively

import shardfn

ROWS, FEATURES = 24, (5, 3)
"""No number of devices divides a dimension but that of rows."""


def rows_of(p: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x.reshape(len(x), -1) @ p["w"])


def two_views(p: Any, batch: Any) -> jax.Array:
    x = jnp.concatenate([batch["a"], batch["b"]])
    return jnp.mean(rows_of(p, x) ** 2)


def five_views(p: Any, batch: Any) -> jax.Array:
    scaled = [batch["a"] * k for k in range(1, 6)]
    return jnp.mean(rows_of(p, jnp.concatenate(scaled)) ** 3)


def contrastive(p: Any, batch: Any) -> jax.Array:
    """Both halves are cut out of what was made of both."""
    z = rows_of(p, jnp.concatenate([batch["a"], batch["b"]]))
    one, other = jnp.split(z, 2)
    return jnp.mean((one - other) ** 2) + jnp.mean(z[:ROWS] * z[ROWS:])


def embedded(p: Any, batch: Any) -> jax.Array:
    """What is joined has a gradient."""
    z = jnp.concatenate([rows_of(p, batch["a"]), rows_of(p, batch["b"])])
    return jnp.mean(jnp.tanh(z @ p["v"]) ** 2)


def twice(p: Any, batch: Any) -> jax.Array:
    """As for guidance without a classifier, and rolled by a computed amount."""
    x = jnp.concatenate([batch["a"], batch["a"]])
    amount = jnp.int32(jnp.sum(batch["b"]) * 0) + 5
    rolled = jnp.roll(batch["b"], amount, axis=0)
    return jnp.mean(rows_of(p, x)) + jnp.mean(rows_of(p, rolled) ** 2)


def cut_again(p: Any, batch: Any) -> jax.Array:
    """What is cut out of joined rows is one of them."""
    x = jnp.concatenate([batch["a"], batch["b"]])
    return jnp.mean(rows_of(p, x[:ROWS]) * rows_of(p, x[ROWS:]) + x.mean())


def grouped(p: Any, batch: Any) -> jax.Array:
    """Groups of rows, one after another, and joined again."""
    groups = batch["a"].reshape(3, ROWS // 3, *FEATURES)
    _, made = lax.scan(lambda _, x: (None, rows_of(p, x)), None, groups)
    return jnp.mean(made.reshape(ROWS, -1) * rows_of(p, batch["b"]))


Loss = Callable[[Any, Any], jax.Array]
LOSSES: list[Loss] = [
    two_views,
    five_views,
    contrastive,
    embedded,
    twice,
    cut_again,
    grouped,
]


def sharded(loss: Loss, *sizes: int) -> Any:
    def train_step(p: Any, batch: Any) -> Any:
        loss_of, grads = jax.value_and_grad(loss)(p, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), loss_of

    axis = ("replica", "data") if len(sizes) > 1 else "data"
    options = GATHERS | {"axis": axis, "min_size": 8}
    step = shardfn.fully_shard(train_step, cpu_mesh(*sizes), **options)
    rng = np.random.default_rng(0)
    shapes = {"w": (15, 7), "v": (7, 9)}
    p = {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in shapes.items()}
    batch = {
        k: jnp.asarray(rng.normal(size=(ROWS, *FEATURES)), jnp.float32) for k in "ab"
    }
    return train_step, step, p, batch


# Devices that do not divide the groups, and two axes; as many as are powers of two.
EACH, ALIKE = [(3,), (2, 4)], [(8,), (4,), (2, 2)]


@pytest.mark.parametrize(
    "sizes, loss",
    [
        *itertools.product(EACH, LOSSES),
        *((sizes, LOSSES[0]) for sizes in ALIKE),
        *itertools.starmap(exhaustively, itertools.product(ALIKE, LOSSES[1:])),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_steps_are_those_of_the_plain_step(loss: Loss, sizes: Any) -> None:
    assert_steps_alike(*sharded(loss, *sizes))


ALONG_BOTH = [two_views, five_views, twice, cut_again, grouped]
"""Halves that are cut apart lie on one replica each, of two."""
CASES = [*((loss, (8,)) for loss in LOSSES), *((loss, (2, 4)) for loss in ALONG_BOTH)]


@pytest.mark.parametrize("loss, sizes", CASES)
def test_no_rows_are_gathered(loss: Loss, sizes: Any) -> None:
    """Along both mesh axes at once, if these split the rows."""
    _, step, p, batch = sharded(loss, *sizes)
    plan = step.plan(p, batch)
    arrays = [c for c in plan.collectives if c.shape and not c.path]
    assert {c.op for c in arrays} <= {"all_to_all", "ppermute"}
    compiled = step.lower(p, batch).compile()
    assert plan.verify(compiled).ok
