"""In: steps that overrule propagation at one value. Out: the numbers of the plain step,
and the collective where the user asked for it.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from sharded_and_plain import make_mesh

import shardfn
from shardfn.testing import assert_parity

X = np.arange(16 * 8, dtype=np.float32).reshape(16, 8) % 5
FREE = P.UNCONSTRAINED


def make_step(overrule: Callable[[str, Any], Any]) -> Callable[..., Any]:
    """A step whose values, called "w", "h" and "dw", pass through `overrule`."""

    def train_step(w, x):
        def loss_fn(w):
            h = overrule("h", x @ overrule("w", w))
            return (h * h).sum(), h

        (loss, h), dw = jax.value_and_grad(loss_fn, has_aux=True)(w)
        return w - 0.125 * overrule("dw", dw), {"loss": loss, "h": h}

    return train_step


def moves(step: Callable[..., Any], mesh: str = "8") -> list[tuple[str, str]]:
    """`(operation, phase)` of every collective but those of scalars."""
    made = shardfn.fully_shard(step, make_mesh(mesh), min_size=8)
    plan = made.plan(jnp.ones((8, 24)), X)
    return [(line.op, line.phase) for line in plan.collectives if line.shape]


TABLE = [
    (
        "nothing",
        lambda name, v: v,
        [("all_gather", "forward"), ("psum_scatter", "backward")],
    ),
    (
        "a weight, gathered as it would be; its gradient is scattered still",
        lambda name, v: shardfn.replicate(v) if name == "w" else v,
        [("all_gather", "forward"), ("psum_scatter", "backward")],
    ),
    (
        "an activation that every device shall hold",
        lambda name, v: shardfn.replicate(v) if name == "h" else v,
        [("all_gather", "forward")] * 2 + [("psum_scatter", "backward")],
    ),
    (
        "a gradient that every device shall hold: all-reduced",
        lambda name, v: shardfn.replicate(v) if name == "dw" else v,
        [("all_gather", "forward"), ("all_reduce", "backward")],
    ),
    (
        "an activation split on its features instead of its rows",
        lambda name, v: shardfn.constrain(v, P(None, "data")) if name == "h" else v,
        None,
    ),
    (
        "a weight that stays as it is stored: the batch is moved",
        lambda name, v: shardfn.constrain(v, P(None, "data")) if name == "w" else v,
        None,
    ),
    (
        "no constraint on any dimension",
        lambda name, v: shardfn.constrain(v, P(FREE, FREE)),
        [("all_gather", "forward"), ("psum_scatter", "update")],
    ),
]


@pytest.mark.parametrize(
    "overrule, expected", [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_the_numbers_stay_and_the_moves_follow(overrule, expected) -> None:
    step = make_step(overrule)
    assert_parity(step, make_mesh("8"), jnp.ones((8, 24)), X, min_size=8)
    if expected is not None:
        assert moves(step) == expected


def test_the_plan_names_the_line() -> None:
    def step(w, x):
        return w, shardfn.replicate(x * 2)

    plan = shardfn.fully_shard(step, make_mesh("8")).plan(jnp.ones(3), X)
    (line,) = plan.collectives
    assert line.op == "all_gather" and line.shape == X.shape
    first = inspect.getsourcelines(step)[1]
    assert line.place.startswith(f"test_constrain.py:{first + 1} ")


def test_both_axes_of_a_mesh() -> None:
    def step(w, x):
        y = shardfn.constrain(x.T, P(("replica", "data")))
        return w, {"y": y, "sum": shardfn.constrain(y, P("data", "replica")).sum(0)}

    assert_parity(step, make_mesh("2x4"), jnp.ones(8), X, axis=("replica", "data"))


def test_vmap_leaves_its_dimension_alone() -> None:
    def step(w, x):
        return w, jax.vmap(lambda row: shardfn.replicate(row * 2).sum())(x)

    made = shardfn.fully_shard(step, make_mesh("8"))
    assert made.plan(jnp.ones(3), X).collectives == ()
    assert_parity(step, make_mesh("8"), jnp.ones(8), X)


def test_in_control_flow() -> None:
    def step(w, x):
        def body(c, row):
            return shardfn.replicate(c + row), shardfn.constrain(c, P("data"))

        out, all_of_them = jax.lax.scan(jax.checkpoint(body), w, x)
        return out, all_of_them

    assert_parity(step, make_mesh("8"), jnp.ones(8), X, min_size=0)


def test_outside_of_a_step_it_is_the_identity() -> None:
    def f(x):
        tree = shardfn.replicate({"x": x})
        return shardfn.constrain(tree["x"], P("nowhere")) ** 2

    x = jnp.arange(3.0)
    for g in (f, jax.jit(f)):
        np.testing.assert_array_equal(g(x), x**2)
    np.testing.assert_array_equal(jax.grad(lambda x: f(x).sum())(x), 2 * x)
    np.testing.assert_array_equal(jax.jacfwd(f)(x), jnp.diag(2 * x))
    key = shardfn.replicate(jax.random.key(0))
    assert key.dtype == jax.random.key(0).dtype


@pytest.mark.parametrize(
    "spec, message",
    [
        (P("model"), "constrain names mesh axis 'model', but the step is sharded over"),
        (P(None, "data"), r"dimension 1 of an array of shape \(16, 5\) into 8 parts"),
    ],
)
def test_what_cannot_be_is_refused(spec, message) -> None:
    def step(w, x):
        return w, shardfn.constrain(x, spec)

    with pytest.raises(shardfn.ShardingError, match=message) as error:
        shardfn.fully_shard(step, make_mesh("8")).plan(jnp.ones(3), X[:, :5])
    assert "test_constrain.py" in str(error.value)


def test_axes_of_a_dimension_are_in_the_order_of_the_mesh() -> None:
    def step(w, x):
        return w, shardfn.constrain(x, P(("data", "replica")))

    run = shardfn.fully_shard(step, make_mesh("2x4"), axis=("replica", "data"))
    message = (
        r"constrain splits a dimension over \('data', 'replica'\), but the step's axes "
        r"are \('replica', 'data'\), major to minor\.\n  at test_constrain\.py:\d+ .*\n"
        r"Write \('replica', 'data'\)\."
    )
    with pytest.raises(shardfn.ShardingError, match=message):
        run.plan(jnp.ones(3), X)


@pytest.mark.parametrize("spec", [P("data", "data"), P(None, ("data", "data"))])
def test_an_axis_named_twice_is_refused(spec) -> None:
    message = (
        r"which names mesh axis 'data' twice\.\n"
        r"  constrain was called at test_constrain\.py:\d+ .*\n"
        r"An axis splits one dimension: name it once\."
    )
    with pytest.raises(ValueError, match=message):
        shardfn.constrain(X, spec)


def test_too_many_entries_are_refused() -> None:
    message = (
        r"which has 1 dimensions\.\n"
        r"  constrain was called at test_constrain\.py:\d+ .*\n"
        r"Leave out the last entries\."
    )
    with pytest.raises(ValueError, match=message):
        shardfn.constrain(jnp.ones(3), P(None, "data"))
