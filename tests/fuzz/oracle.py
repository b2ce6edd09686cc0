"""In: a random program. Out: nothing, or an AssertionError that names the first leaf
where its sharded step differs from the plain one by more than rounding.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from language import Block, Program, make_batch, make_state, make_step
from operations import RUN, TABLE
from sharded_and_plain import make_mesh

import shardfn
from shardfn.testing._compare import snapshot

TOL = 1e-4
NUDGE = 1e-6


def assert_same_steps(program: Program, steps: int = 2) -> bool:
    """Runs both steps on the same state, `steps` times, the state staying sharded.

    Returns:
      False if nothing can be said: numbers overflow, or rounding decides the result.
    """
    plain = jax.jit(make_step(program, RUN))
    step = shard(program)
    state = step.shard(make_state(program))
    exact = any(TABLE[name].jumps for name in names(program.forward))
    for k in range(steps):
        whole, batch = step.unshard(state), make_batch(program, k)
        expected = plain(whole, batch)
        if not all(map(_finite, jax.tree.leaves(expected))):
            return False
        state, metrics = step(state, batch)
        found = step.unshard(state), metrics
        wrong = difference(expected, found)
        if wrong and not exact:
            noise = sensitivity(plain, whole, batch, expected)
            if not difference(expected, found, noise):
                return False
        assert not wrong, f"step {k + 1}: {wrong}\n{program}\n{program!r}"
        if exact:
            # The program jumps: rounding must not decide where.
            state = step.shard(jax.tree.map(rounded, found[0]))
    return True


def shard(program: Program) -> shardfn.ShardedStep:
    """The sharded step of `program`, on its mesh."""
    mesh = make_mesh(program.mesh)
    axes = mesh.axis_names if len(mesh.axis_names) > 1 else mesh.axis_names[0]
    plain = make_step(program, RUN)
    return shardfn.fully_shard(plain, mesh, axis=axes, min_size=program.min_size)


def names(block: Block) -> Iterator[str]:
    """The operations of a block and of the bodies in it."""
    for call in block.calls:
        yield call.op
        for body in call.bodies:
            yield from names(body)


def difference(a: Any, b: Any, noise: Any = None) -> str | None:
    """What differs between two pytrees; by more than 30 times `noise`, if given."""
    x, y = snapshot(a), snapshot(b)
    if x.structure != y.structure:
        return f"structure {y.structure} instead of {x.structure}"
    extra = [0.0] * len(x.leaves) if noise is None else noise
    for (path, p), (_, q), allowed in zip(x.leaves, y.leaves, extra, strict=True):
        if p.aval.split(" weak")[0] != q.aval.split(" weak")[0]:
            return f"{path}: {q.aval} instead of {p.aval}"
        gap = np.linalg.norm(np.float64(p.value) - np.float64(q.value))
        limit = TOL * max(1.0, float(np.linalg.norm(np.float64(p.value))))
        if not jnp.issubdtype(p.value.dtype, jnp.inexact):
            limit = 0.0
        if not gap <= limit + 30 * allowed:
            return f"{path} ({p.aval}) is off by {gap:.2g}:\n{q.value}\nnot\n{p.value}"
    return None


def sensitivity(plain: Any, whole: Any, batch: Any, expected: Any) -> list[float]:
    """Per result, how far it moves when the state moves by what rounding could."""
    rng = np.random.default_rng(0)

    def nudged(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        by = rng.standard_normal(x.shape, np.float32)
        return x + NUDGE * (jnp.abs(x) + 1) * by

    other = plain(jax.tree.map(nudged, whole), batch)
    pairs = zip(jax.tree.leaves(expected), jax.tree.leaves(other), strict=True)
    return [
        float(np.linalg.norm(np.float64(a) - np.float64(b)))
        if jnp.issubdtype(a.dtype, jnp.floating)
        else 0.0
        for a, b in pairs
    ]


def rounded(x: jax.Array) -> jax.Array:
    return jnp.round(x) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _finite(x: jax.Array) -> bool:
    inexact = jnp.issubdtype(x.dtype, jnp.inexact)
    return not inexact or bool(np.isfinite(np.asarray(x)).all())
