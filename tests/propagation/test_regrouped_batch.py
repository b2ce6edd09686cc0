"""In: a batch that is reshaped into fewer groups than there are devices, or into a
number of groups that they do not divide. Out: the plain step's values; an all-to-all of
the rows in place of a gather.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from plan_helpers import cpu_mesh

import shardfn

ROWS, COLUMNS, DEVICES = 96, 3, 8
# With each number of groups, the rows that a device sends of its twelve: by an
# all-to-all, by permutes. Seven groups would take as many as with padding.
GROUPS = {2: (0, 12), 3: (0, 12), 4: (0, 12), 6: (0, 12), 12: (7, 4)}


def grouped(x: jax.Array, count: int) -> jax.Array:
    return x.reshape((count, ROWS // count) + x.shape[1:])


def minibatches(w: jax.Array, x: jax.Array, count: int) -> Any:
    """One update per group, as in PPO."""

    def update(w, rows):
        grad = jax.grad(lambda w: jnp.sum((rows @ w) ** 2))(w)
        return w - grad / 2**10, jnp.sum(rows @ w)

    return lax.scan(update, w, grouped(x, count))


CASES: dict[str, Callable] = {
    **{f"{k} groups": lambda w, x, k=k: grouped(x, k) * 2 for k in GROUPS},
    "transposed": lambda w, x: grouped(x, 4).swapaxes(0, 1) * 2,
    "booleans": lambda w, x: grouped(x > 0, 4),
    "narrow integers": lambda w, x: grouped(x.astype(jnp.int8), 3),
    "scalars": lambda w, x: grouped(x[:, 0], 6),
    "gradient": lambda w, x: jax.grad(
        lambda x: (grouped(x, 4) ** 2 * (1 + jnp.arange(4))[:, None, None]).sum()
    )(x),
    "back again": lambda w, x: (grouped(x, 4) * 2).reshape(ROWS, COLUMNS),
    "minibatches": lambda w, x: minibatches(w, x, 4),
    "shuffled": lambda w, x: minibatches(
        w, x[jax.random.permutation(jax.random.key(0), ROWS)], 6
    ),
}


@pytest.mark.parametrize("sizes", [(8,), (2, 4)])
def test_groups_are_those_of_the_plain_step(sizes: tuple[int, ...], integers) -> None:
    def step(w, x):
        names = CASES if len(sizes) == 1 else ("4 groups", "3 groups", "shuffled")
        return w, {name: CASES[name](w, x) for name in names}

    w, x = integers((COLUMNS, 8)), integers((ROWS, COLUMNS))
    axes = ("replica", "data") if len(sizes) == 2 else "data"
    with jax.numpy_dtype_promotion("standard"):
        sharded = shardfn.fully_shard(
            step, cpu_mesh(*sizes), axis=axes, state_argnums=0, min_size=0, donate=False
        )
        expected, got = jax.jit(step)(w, x), jax.device_get(sharded(w, x))
    close = {"rtol": 1e-4, "atol": 1e-3}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **close), expected, got)


@pytest.mark.parametrize("count", GROUPS)
def test_rows_are_exchanged(count: int) -> None:
    step = shardfn.fully_shard(
        lambda s, x: (s, jnp.tanh(grouped(x, count))), cpu_mesh(DEVICES)
    )
    args = jnp.float32(0), jnp.ones((ROWS, COLUMNS))
    plan, sent = step.plan(*args), Counter()
    for line in plan.collectives:
        sent[line.op] += line.total_bytes / (4 * COLUMNS)
    assert (sent["all_to_all"], sent["ppermute"]) == GROUPS[count]
    assert sent.total() == sum(GROUPS[count])
    if count in (3, 12):
        checked = plan.verify(step.lower(*args).compile())
        assert checked.ok and not checked.extra
