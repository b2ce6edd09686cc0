"""Which values of a program count as computed alike, and what a check makes of it."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from plan_helpers import cpu_mesh

import shardfn
from shardfn._trace.jaxpr_to_program import make_program
from shardfn.analysis._computed_alike import computed_alike

X = jax.ShapeDtypeStruct((8, 1, 4), jnp.float32)


@pytest.mark.parametrize(
    "again, is_same",
    [
        (lambda x: x.reshape(32).reshape(8, 1, 4), True),
        (lambda x: x.transpose(1, 0, 2).transpose(1, 0, 2), True),
        (lambda x: lax.rev(x, (1,)), True),
        (lambda x: jnp.squeeze(x, 1)[:, None], True),
        (lambda x: lax.slice(x, (0, 0, 0), (8, 1, 4)), True),
        (lambda x: lax.broadcast_in_dim(x[:, 0], (8, 1, 4), (0, 2)), True),
        (lambda x: lax.rev(x, (0,)), False),
        (lambda x: x.transpose(2, 1, 0).reshape(8, 1, 4), False),
        (lambda x: jnp.concatenate([x[4:], x[:4]]), False),
        (lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), False),
        (lambda x: jnp.broadcast_to(x[:, :, :1], x.shape), False),
    ],
)
def test_elements_that_get_their_shape_back_are_the_same(again, is_same) -> None:
    """Of two sums, the second is of `x` behind what `again` does to it."""
    jaxpr = jax.make_jaxpr(lambda x: (jnp.sum(x), jnp.sum(again(x))))(X)
    program = make_program(jaxpr)
    first = computed_alike(program, {})
    one, other = (first[value] for value in program.outputs)
    assert (one == other) is is_same


def test_what_unique_gathers_twice_may_move_once() -> None:
    """It sorts what it is given behind a flip of a dimension of one element."""

    def train_step(state, x):
        def loss(w):
            h = jnp.tanh(x @ w)
            found, _ = jnp.unique(
                jnp.argmax(h, -1), size=8, return_counts=True, fill_value=0
            )
            return jnp.mean(h**2) + jnp.sum(h[jnp.arange(8), found])

        value, grads = jax.value_and_grad(loss)(state)
        return state - 0.1 * grads, value

    step = shardfn.fully_shard(train_step, cpu_mesh(8))
    state = jax.ShapeDtypeStruct((64, 128), jnp.float32)
    args = state, jax.ShapeDtypeStruct((64, 64), jnp.float32)
    checked = step.plan(*args).verify(step.lower(*args).compile())
    found = [c.status for c in checked.lines if c.line.dtype == "int32"]
    assert checked.ok and sorted(found)[:1] == ["once"]
