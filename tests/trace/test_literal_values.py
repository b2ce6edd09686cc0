"""In: steps with arrays that have no elements, and with counts and zeros that JAX's
derivatives make. Out: these are made where they are needed, and nothing moves them: as
the plain step, with what is planned in the compiled program.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from plan_helpers import cpu_mesh

import shardfn
from shardfn._trace.jaxpr_to_program import make_program
from shardfn.testing import assert_parity

ROWS, WIDTH = 16, 8
Loss = Callable[[Any, jax.Array], jax.Array]


def plain(p: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((x @ p["w"]) ** 2)


def looped(p: Any, x: jax.Array) -> jax.Array:
    """A carry without elements, and a slice without them of a weight."""

    def one(carry: Any, _: None) -> Any:
        rows, none = carry
        return (jnp.tanh(rows @ p["w"]) + none.sum(), none * 2 + p["w"][:0]), None

    return jnp.mean(lax.scan(one, (x, x[:0]), length=3)[0][0] ** 2)


EMPTY: dict[str, Loss] = {
    "rows": lambda p, x: plain(p, x) + x[:0].sum(),
    "columns": lambda p, x: plain(p, x) + (x[:, :0] @ p["none"]).sum(),
    "weight": lambda p, x: plain(p, x) + jnp.tanh(p["w"][:, :0]).sum(),
    "gradient": lambda p, x: plain(p, x) + (p["none"] ** 2).sum(),
    "joined": lambda p, x: plain(p, jnp.concatenate([x[:0], x, x[:0] + 1])),
    "product": lambda p, x: plain(p, x) + (x[:0] @ p["w"]).sum() + x[:0].T.sum(),
    "looped": looped,
    "branch": lambda p, x: lax.cond(
        x[0, 0] > 0, plain, lambda p, x: plain(p, x) + (x[:0] @ p["w"]).sum(), p, x
    ),
    "rows by numbers": lambda p, x: (
        plain(p, x) + (x @ p["w"])[jnp.zeros(0, jnp.int32)].sum()
    ),
}


def sorted_back(p: Any, x: jax.Array) -> jax.Array:
    """Rows in another order, by the inverse of a permutation."""
    y = x @ p["w"]
    return jnp.mean((jnp.zeros_like(y).at[jnp.argsort(y[:, 0])].set(y) * x) ** 2)


def there_and_back(p: Any, x: jax.Array) -> jax.Array:
    y, order = x @ p["w"], jnp.argsort(x[:, 0])
    return jnp.mean((jnp.zeros_like(y).at[order].set(jnp.tanh(y[order])) * x) ** 2)


def counted(p: Any, x: jax.Array) -> jax.Array:
    """Numbers of rows, which a scatter writes whole and a product reads in parts."""
    y = x @ p["w"]
    counts = jnp.broadcast_to(jnp.arange(ROWS, dtype=jnp.float32)[:, None], y.shape)
    placed = jnp.zeros_like(y).at[jnp.argsort(y[:, 0])].set(counts * 2)
    return jnp.mean(y * counts * 2 + y * placed)


MADE: dict[str, Loss] = {
    "sorted back": sorted_back,
    "there and back": there_and_back,
    "counted": counted,
}


def train(name: str) -> Any:
    loss_fn = (EMPTY | MADE)[name]

    def step(p: Any, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(p, x)
        metrics = (loss, x[:0]) if name in EMPTY else loss
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), metrics

    return step


def arguments() -> tuple[Any, jax.Array]:
    rng = np.random.default_rng(0)
    w, x = (rng.normal(size=(n, WIDTH)) for n in (WIDTH, ROWS))
    state = {"w": jnp.asarray(w, jnp.float32), "none": jnp.zeros((0, WIDTH))}
    return state, jnp.asarray(x, jnp.float32)


@pytest.mark.covering(1)
@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("name", [*EMPTY, *MADE])
def test_what_is_made_of_literals_does_not_move(name: str, devices: int) -> None:
    step, mesh = train(name), cpu_mesh(devices)
    state, x = arguments()
    state = state if name in EMPTY else {"w": state["w"]}
    assert_parity(step, mesh, state, x, min_size=0, verify="error")
    moves = shardfn.fully_shard(step, mesh, min_size=0).plan(state, x).collectives
    assert not [c for c in moves if not math.prod(c.shape)]
    # Numbers that JAX gives the rows: only what a scatter makes of them is gathered.
    assert len([c for c in moves if c.dtype == "uint32"]) <= 1
    if name == "counted":
        assert not [c for c in moves if c.shape == x.shape]


def test_zeros_are_no_selection() -> None:
    """XLA, too, sees that they depend on nothing; one of minus zero is kept."""

    def chosen(case: jax.Array, other: float) -> jax.Array:
        return jnp.where(case, jnp.zeros(4), jnp.full(4, other))

    case = jnp.zeros(4, bool)
    for other, names in ((0.0, []), (-0.0, ["select_n"]), (1.0, ["select_n"])):
        closed = jax.make_jaxpr(lambda case, o=other: chosen(case, o))(case)
        nodes = make_program(closed).nodes
        made = [node.eqn.primitive.name for node in nodes]
        assert [name for name in made if name == "select_n"] == names
