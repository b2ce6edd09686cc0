"""In: steps that are closed over arrays. Out: the plan says what they take, if that is
more than the arguments.
"""

import jax
import jax.numpy as jnp
import pytest
from plan_helpers import cpu_mesh

import shardfn

FROZEN = jnp.ones((64, 64))


@pytest.mark.parametrize("rows, said", [(8, True), (2048, False)])
def test_what_a_step_captures_is_said_if_it_is_much(rows: int, said: bool) -> None:
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ FROZEN) * w))(w)
        return w - 0.1 * grad, loss

    sharded = shardfn.fully_shard(step, cpu_mesh(8), stationary=False)
    notes = sharded.plan(jnp.ones(64), jnp.ones((rows, 64))).notes
    found = [note for note in notes if note.startswith("arrays that the step captures")]
    text = (
        "arrays that the step captures are whole on every device: 16.0 KiB, more than "
        "its arguments take, 512 B. Pass frozen weights as an argument: they are "
        "stored like state"
    )
    assert found == ([text] if said else [])


def test_one_device_has_them_anyway() -> None:
    step = shardfn.fully_shard(lambda w, x: (w, (x @ FROZEN).sum()), cpu_mesh(1))
    plan = step.plan(jnp.ones(()), jnp.ones((8, 64)))
    assert "captures" not in str(plan)
