"""In: attention, whose scores' gradient two products read, and steps in which a value
that several products read is small, or more than that. Out: what TPUs' plans have each
product make itself; the plain step's numbers; and, in programs compiled for v5ps,
attention without that gradient in memory.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plan_helpers import cpu_mesh, walk

import shardfn
from shardfn._core import compat
from shardfn._core.barrier import unfused_p
from shardfn._core.errors import where
from shardfn._core.plan import Apply, BodyPlan
from shardfn._core.program import Program
from shardfn._schedule import duplicate_producers as duplication, host_transfers
from shardfn.analysis import targets
from shardfn.analysis._heap_size import compiled_with_heap
from shardfn.testing import assert_parity

V5P = "tpu:v5p:2x2x2"
HEADS, WIDTH = 2, 16


@pytest.fixture
def fuses(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """CPUs are planned for as TPUs are, small values as large ones."""
    monkeypatch.setattr(compat, "fuses_producers", lambda platform: True)
    monkeypatch.setattr(duplication, "DUPLICATED_BYTES", 1)
    return monkeypatch


def attend(w: Any, x: jax.Array) -> jax.Array:
    """Causal attention of `[B, T, D]`, in plain JAX."""
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, w[n].astype(x.dtype)) for n in "qkv")
    scores = jnp.einsum("bthk,bshk->bhts", q, k).astype(jnp.float32)
    T = x.shape[1]
    scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -1e30)
    weights = jax.nn.softmax(scores, -1).astype(x.dtype)
    mixed = jnp.einsum("bhts,bshk->bthk", weights, v)
    return x + jnp.einsum("bthk,hkd->btd", mixed, w["out"].astype(x.dtype))


def train(state: Any, x: jax.Array, remat: bool = True) -> Any:
    """Layers of it in a scan."""

    def loss_fn(w: Any) -> jax.Array:
        layer = jax.checkpoint(attend) if remat else attend
        h, _ = jax.lax.scan(lambda h, w: (layer(w, h), None), x, w)
        return jnp.mean(h.astype(jnp.float32) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state)
    return jax.tree.map(lambda w, g: w - g, state, grads), loss


def weights(layers: int, width: int, heads: int, head: int, make: Any) -> Any:
    shape = layers, width, heads, head
    return {n: make(shape) for n in "qkv"} | {"out": make((layers, heads, head, width))}


def small() -> tuple[Any, jax.Array]:
    rng = np.random.default_rng(0)

    def make(shape: tuple[int, ...]) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / 4, jnp.float32)

    return weights(3, WIDTH, HEADS, 8, make), make((8, 12, WIDTH))


def bodies(program: Program, body: BodyPlan) -> Iterator[tuple[Program, BodyPlan]]:
    """A plan and all plans in it, each with its program."""
    yield program, body
    for step in body.steps:
        if isinstance(step, Apply):
            node = program.nodes[step.node]
            for inner in zip(node.bodies, step.bodies, strict=True):
                yield from bodies(*inner)


def duplicated(plain: Callable[..., Any], state: Any, batch: Any) -> list[Any]:
    """The shapes of what products make themselves, in the order of the plan."""
    step = shardfn.fully_shard(plain, cpu_mesh(8), stationary=False, min_size=16)
    given, rows = step._divide((state, batch), {})
    planned = step.programs.planned(*step.storage.leaves(given), rows)
    return [
        program.avals[ref.value].shape
        for program, body in bodies(planned.program, planned.body)
        for ref in body.duplicated
    ]


SCORES = 8, HEADS, 12, 12


@pytest.mark.parametrize("remat", [True, False])
def test_products_make_the_gradient_of_scores(
    fuses: pytest.MonkeyPatch, remat: bool
) -> None:
    """That of the queries and that of the keys do. With remat, so do the products that
    the weights themselves are repeated for, and the gradient of the values."""

    def step(state: Any, x: jax.Array) -> Any:
        return train(state, x, remat)

    assert duplicated(step, *small()) == [SCORES] * (1 + remat)
    assert_parity(step, cpu_mesh(8), *small(), steps=3, stationary=False, min_size=16)


@pytest.mark.parametrize("name", ["DUPLICATED_BYTES", "DUPLICATED_COLUMNS"])
def test_what_is_small_or_read_several_times_is_made_once(
    fuses: pytest.MonkeyPatch, name: str
) -> None:
    size = 4 * HEADS * 12 * 12
    made = {"DUPLICATED_BYTES": (size, size + 1), "DUPLICATED_COLUMNS": (8, 7)}
    for limit, is_made in zip(made[name], (True, False), strict=True):
        fuses.setattr(duplication, name, limit)
        assert bool(duplicated(train, *small())) == is_made


def test_other_compilers_make_it_once() -> None:
    assert not duplicated(train, *small())


def of(made: Callable[[jax.Array, jax.Array], Any]) -> Callable[..., Any]:
    """A step whose result is made of rows, and of a product of them."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        return w, made(x @ w, x)

    return step


TWICE = {
    "two, each of its own": (lambda y, x: (x.T @ jnp.tanh(y), jnp.sin(y) @ x.T), False),
    "two, of one value": (lambda y, x: twice(jnp.tanh(y), x), True),
    "one product": (lambda y, x: jnp.tanh(y).T @ x, False),
    "a product and a sum": (lambda y, x: (t := jnp.tanh(y)).T @ x + t.sum(), False),
    "it is returned": (lambda y, x: (twice(t := jnp.tanh(y), x), t), False),
    "a product of itself": (lambda y, x: twice(t := jnp.tanh(y), t)[0], False),
    "no operation": (lambda y, x: twice(y, x), False),
    "of too many": (
        lambda y, x: twice(y * x * (x @ x.T @ x) * (x + x @ y.T @ x), x),
        False,
    ),
}


def twice(y: jax.Array, x: jax.Array) -> Any:
    return jnp.einsum("ab,ac->bc", y, x), jnp.einsum("ab,ac->bc", y, x + 1)


@pytest.mark.parametrize("case", TWICE)
def test_it_takes_two_products_and_no_one_else(
    fuses: pytest.MonkeyPatch, case: str
) -> None:
    made, is_made = TWICE[case]
    w, x = jnp.ones((16, 16)) / 8, jnp.arange(16.0 * 16).reshape(16, 16) / 128
    assert len(duplicated(of(made), w, x)) == is_made
    sharded = shardfn.fully_shard(of(made), cpu_mesh(8), stationary=False, min_size=16)
    jaxpr = jax.make_jaxpr(sharded)(w, x).jaxpr
    assert sum(e.primitive.name == "tanh" for e, *_ in walk(jaxpr)) <= 1 + is_made
    barriers = [e for e, *_ in walk(jaxpr) if e.primitive is unfused_p]
    assert len(barriers) == is_made
    assert_parity(of(made), cpu_mesh(8), w, x, steps=2, stationary=False, min_size=16)


@pytest.mark.parametrize("block", [256, 2**21])
def test_what_a_loop_over_blocks_makes_is_in_memory(
    fuses: pytest.MonkeyPatch, block: int
) -> None:
    """As of an optimizer whose moments live on the host, and go into products."""
    fuses.setattr(host_transfers, "HOST_BLOCK_BYTES", block)

    def step(state: Any, x: jax.Array) -> Any:
        w, m = state["w"], state["m"]
        y = 0.5 * m + w
        a = jnp.einsum("lij,lik->ljk", y, w), jnp.einsum("lij,lik->ljk", y, w * w)
        return {"w": w * 0.5 + 0.125, "m": m * 0.5 + w}, (x.sum(), *map(jnp.sum, a))

    state = {n: jnp.ones((8, 16, 16)) * k for k, n in enumerate("wm", 1)}
    options: dict[str, Any] = {"stationary": False, "min_size": 16, "offload": "host"}
    assert_parity(step, cpu_mesh(8), state, jnp.ones((8, 4)), steps=2, **options)


def test_a_plan_says_so(fuses: pytest.MonkeyPatch) -> None:
    step = shardfn.fully_shard(of(TWICE["two, of one value"][0]), cpu_mesh(8))
    plan = step.plan(jnp.ones((16, 16)), jnp.ones((16, 16)))
    (tanh,) = [n for n, *_ in plan.operations if n.eqn.primitive.name == "tanh"]
    place = where(tanh.eqn).partition(" ")[0]
    assert "of 128.0 MiB or more (limits.DUPLICATED_BYTES)" in plan.explain(place)
    assert "tanh" in plan.explain(place)


def held() -> float:
    """Of a v5p that trains attention: its heap, in arrays of scores in bfloat16."""
    heads, length = 4, 4096
    shapes = weights(2, 128, heads, 32, tuple)
    state = {n: jax.ShapeDtypeStruct(x, jnp.float32) for n, x in shapes.items()}
    x = jax.ShapeDtypeStruct((8, length, 128), jnp.bfloat16)
    lowered = shardfn.fully_shard(train, targets.mesh(V5P)).lower(state, x)
    return compiled_with_heap(lowered, "tpu")[1] / (2 * heads * length**2)


@pytest.mark.aot(V5P)
def test_tpus_hold_no_gradient_of_scores() -> None:
    """Scores and the gradient of their softmax are all that is held of that size."""
    assert held() < 2.2


@pytest.mark.aot(V5P)
@pytest.mark.exhaustive
def test_they_would_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once they do not, the pass can go."""
    monkeypatch.setattr(duplication, "DUPLICATED_BYTES", 2**60)
    assert held() > 2.9
