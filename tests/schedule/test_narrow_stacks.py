"""In: steps whose loops cast what they stack to a wider dtype.
Out: loops that stack what they have before the cast; to the bit, the plain step.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from plan_helpers import cpu_mesh, walk

import shardfn
from shardfn._schedule import narrow_stacks

LAYERS, WIDTH = 3, 16
WEIGHTS = (LAYERS, WIDTH, WIDTH)
REMATS = pytest.mark.parametrize("remat", [False, True])


def train(state: Any, x: jax.Array, remat: bool = False) -> Any:
    """Layers compute in bfloat16 with masters in float32, which their gradients are
    cast to."""

    def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(h @ w.astype(jnp.bfloat16)), None

    def loss_fn(w: jax.Array) -> jax.Array:
        body = jax.checkpoint(layer) if remat else layer
        h, _ = lax.scan(body, x.astype(jnp.bfloat16), w)
        return jnp.sum(h.astype(jnp.float32))

    loss, grad = jax.value_and_grad(loss_fn)(state)
    return state - grad / 64, loss


def state_and_batch() -> tuple[jax.Array, jax.Array]:
    random = np.random.default_rng(0)
    # Small integers, of which sums are exact in bfloat16 too.
    w = random.integers(-1, 2, WEIGHTS).astype(np.float32) / 4
    x = random.integers(-1, 2, (8, WIDTH)).astype(np.float32)
    return jnp.asarray(w), jnp.asarray(x)


def stacked(step: Any, *given: Any) -> set[str]:
    """The dtypes of the gradients' stacks in the program that JAX is given."""
    jaxpr = jax.make_jaxpr(step)(*given).jaxpr
    scans = [e for e, *_ in walk(jaxpr) if e.primitive.name == "scan"]
    made = [v.aval for e in scans for v in e.outvars if e.params["reverse"]]
    return {str(a.dtype) for a in made if a.ndim == len(WEIGHTS)}


@REMATS
def test_gradients_are_stacked_in_the_dtype_of_their_layer(remat: bool) -> None:
    def step(state: Any, x: jax.Array) -> Any:
        return train(state, x, remat)

    given = state_and_batch()
    sharded = shardfn.fully_shard(step, cpu_mesh(8), min_size=16, stationary=False)
    assert stacked(step, *given) == {"float32"}
    assert stacked(sharded, *given) == {"bfloat16"}
    new, loss = sharded(*given)
    expected, same_loss = jax.jit(step)(*given)
    assert new.dtype == expected.dtype
    np.testing.assert_array_equal(sharded.unshard(new), expected)
    assert loss == same_loss


def test_little_memory_is_not_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan says why where it is."""
    given = state_and_batch()

    def made() -> shardfn.ShardedStep:
        return shardfn.fully_shard(
            train,
            cpu_mesh(8),
            min_size=16,
            stationary=False,
            reshard_after_forward=True,
        )

    plan = made().plan(*given)
    (line,) = (c for c in plan.collectives if c.reduces and c.path)
    assert "narrow_stacks: stacked as it is, and cast behind the loop" in plan.explain(
        line.path
    )
    monkeypatch.setattr(narrow_stacks, "NARROW_STACKS", 0.5)
    assert stacked(made(), *given) == {"float32"}
    assert "narrow_stacks: " not in made().plan(*given).explain(line.path)


def test_sums_in_a_wider_dtype_are_stacked_in_it() -> None:
    """They would be rounded in between."""
    sharded = shardfn.fully_shard(
        train, cpu_mesh(8), min_size=16, stationary=False, reduce_dtype="float32"
    )
    assert stacked(sharded, *state_and_batch()) == {"float32"}


def stacks(body: Any, xs: jax.ShapeDtypeStruct) -> list[str]:
    """What a scan with this body stacks in the program that JAX is given."""

    def step(state: jax.Array, x: jax.Array) -> Any:
        carry, made = lax.scan(body, jnp.zeros((), x.dtype), x)
        return state, (carry, made)

    sharded = shardfn.fully_shard(step, cpu_mesh(8), batch_spec=jax.P(None, "data"))
    jaxpr = jax.make_jaxpr(sharded)(jnp.ones(()), xs).jaxpr
    (scan,) = (e for e, *_ in walk(jaxpr) if e.primitive.name == "scan")
    return [str(v.aval.dtype) for v in scan.outvars if v.aval.ndim > 1]


XS = jax.ShapeDtypeStruct((4, 8), jnp.bfloat16)
WIDE = jax.ShapeDtypeStruct((4, 8), jnp.float32)


def test_what_a_body_reads_wide_is_still_stacked_narrow() -> None:
    def body(c: jax.Array, x: jax.Array) -> Any:
        wide = jax.checkpoint(lambda x: (x * x).astype(jnp.float32))(x)
        return c + jnp.sum(wide).astype(c.dtype), wide

    assert stacks(body, XS) == ["bfloat16"]


def test_a_cast_that_rounds_stays() -> None:
    """Also between dtypes of as many bits."""

    def body(c: jax.Array, x: jax.Array) -> Any:
        narrow = (x * x).astype(jnp.bfloat16)
        return c, (narrow, narrow.astype(jnp.float16))

    assert stacks(body, WIDE) == ["bfloat16", "float16"]
