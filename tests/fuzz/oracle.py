"""In: a random program. Out: a verdict, or an AssertionError that names the first leaf
where its sharded step differs from the plain one by more than rounding.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from journeys import JOURNEYS, aliased, look_alike
from language import Block, Program
from operations import RUN, TABLE
from steps import FORMS, Step, batch_spec, make_batch, make_state, make_step
from surroundings import AS_THE_USER, MESHES, SETTINGS

import shardfn
from shardfn.testing._compare import snapshot

TOL = 1e-4
NUDGE = 1e-6
COARSE = 300
"""How much more rounding there is where dtypes of 8 bits are on the wire."""


MARGIN = 30
"""How many times what rounding was seen to do is allowed."""

SAME, ASKED, UNCLEAR = "same", "asked", "unclear"
"""Verdicts."""

QUESTIONS = ("it cannot be told which arguments of", "pass state_argnums=")
"""What `fully_shard` says if an argument may be state or not."""


def assert_same_steps(program: Program, steps: int = 3) -> str:
    """Runs both steps on the same state, `steps` times, the state staying sharded.

    Returns:
      SAME; ASKED if an error, with reason, asks which arguments are state; or UNCLEAR
      if nothing can be said: numbers overflow, rounding decides the result, or JAX's
      setting forbids the plain step.
    """
    with SETTINGS[program.setting]():
        try:
            return _assert_same_steps(program, steps)
        except shardfn.ShardingError as error:
            asks = any(question in str(error) for question in QUESTIONS)
            if not (asks and may_be_rows(program)):
                raise
            return ASKED


def may_be_rows(program: Program) -> bool:
    """Whether an argument that comes back may be rows: no `state_argnums` says that it
    is not, and all its leaves have as many of them, or a dimension as long as rows."""
    form, rows = FORMS[program.form], program.batch[0].shape[0] // program.micro
    if form.options:
        return False
    arguments = [a for a in form.args(make_state(program), None) if a is not None]
    shapes = [[x.shape for x in jax.tree.leaves(a) if x.shape] for a in arguments]
    return any(
        len({shape[0] for shape in leaves}) == 1
        or all(any(n % rows == 0 for n in shape) for shape in leaves)
        for leaves in shapes
        if leaves
    )


def _assert_same_steps(program: Program, steps: int) -> str:
    form = FORMS[program.form]
    whole_step = plain_step(program)
    plain = jax.jit(lambda state, batch: form.keep(whole_step(state, batch)))
    step = shard(program)
    state = step.shard(make_state(program))
    exact = jumps(program.forward)
    scale = COARSE if coarse(program) else 1
    for k in range(steps):
        state = aliased(state, program)
        whole = step.unshard(state)
        state = JOURNEYS[program.between](state, program)
        batch = make_batch(program, k, whole)
        try:
            expected = plain(whole, batch)
        except (FloatingPointError, TypeError):
            if not program.setting:
                raise
            return UNCLEAR
        if not all(map(_finite, jax.tree.leaves(expected))):
            return UNCLEAR
        if program.between and k == 1:
            wrong = difference(*look_alike(program, whole, state))
            assert not wrong, told(program, k, f"another step: {wrong}")
        state, metrics = form.read(
            step(*form.args(state, make_batch(program, k, state)))
        )
        found = step.unshard(state), metrics
        wrong = difference(expected, found, scale=scale)
        if wrong:
            noise = (
                cancelled(program, whole, batch, expected)
                if exact
                else sensitivity(plain, whole, batch, expected, scale)
            )
            if not difference(expected, found, noise, scale):
                return UNCLEAR
            if exact:
                noise = rounding(program, whole, batch, expected)
                if not difference(expected, found, noise, scale):
                    return UNCLEAR
        assert not wrong, told(program, k, wrong)
        if exact:
            # The program jumps: rounding must not decide where.
            state = step.shard(jax.tree.map(rounded, found[0]))
    return SAME


def told(program: Program, k: int, wrong: str | None) -> str:
    return f"step {k + 1}: {wrong}\n{program}\n{program!r}"


def plain_step(program: Program) -> Step:
    """The plain step; what JAX's setting forbids the language's own code may do."""
    step, allowed = make_step(program, RUN), AS_THE_USER.get(program.setting)

    def run(state: Any, batch: Any) -> Any:
        with allowed() if allowed else contextlib.nullcontext():
            return step(state, batch)

    return run


def shard(program: Program) -> shardfn.ShardedStep:
    """The sharded step of `program`, on its mesh."""
    layout, form = MESHES[program.mesh], FORMS[program.form]
    return shardfn.fully_shard(
        form.write(plain_step(program)),
        layout.mesh,
        axis=layout.axis,
        min_size=program.min_size,
        batch_spec=batch_spec(program),
        **form.options,
        **dict(program.options),
    )


def jumps(forward: Block) -> bool:
    return any(TABLE[name].jumps for name in names(forward))


def coarse(program: Program) -> bool:
    return "bfloat16" in dict(program.options).values()


def names(block: Block) -> Iterator[str]:
    """The operations of a block and of the bodies in it."""
    for call in block.calls:
        yield call.op
        for body in call.bodies:
            yield from names(body)


def difference(a: Any, b: Any, noise: Any = None, scale: float = 1) -> str | None:
    """What differs between two pytrees; by more than `MARGIN` times `noise`, if
    given."""
    x, y = snapshot(a), snapshot(b)
    if x.structure != y.structure:
        return f"structure {y.structure} instead of {x.structure}"
    extra = [0.0] * len(x.leaves) if noise is None else noise
    for (path, p), (_, q), allowed in zip(x.leaves, y.leaves, extra, strict=True):
        if p.aval.split(" weak")[0] != q.aval.split(" weak")[0]:
            return f"{path}: {q.aval} instead of {p.aval}"
        gap = np.linalg.norm(np.float64(p.value) - np.float64(q.value))
        limit = TOL * scale * max(1.0, float(np.linalg.norm(np.float64(p.value))))
        if not jnp.issubdtype(p.value.dtype, jnp.inexact):
            limit = 0.0
        if not gap <= limit + MARGIN * allowed:
            return f"{path} ({p.aval}) is off by {gap:.2g}:\n{q.value}\nnot\n{p.value}"
    return None


def sensitivity(
    plain: Any, whole: Any, batch: Any, expected: Any, scale: float = 1
) -> list[float]:
    """Per result, how far it moves when its arguments move by what rounding could."""
    rng = np.random.default_rng(0)

    def nudged(x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        by = rng.standard_normal(x.shape, np.float32)
        x = np.asarray(x)
        return x + np.float32(NUDGE * scale) * (np.abs(x) + 1) * by

    other = plain(*jax.tree.map(nudged, (whole, batch)))
    pairs = zip(jax.tree.leaves(expected), jax.tree.leaves(other), strict=True)
    return [
        float(np.linalg.norm(np.float64(a) - np.float64(b)))
        if jnp.issubdtype(a.dtype, jnp.floating)
        else 0.0
        for a, b in pairs
    ]


def cancelled(program: Program, whole: Any, batch: Any, expected: Any) -> list[float]:
    """Per result, how far it moves by the order of a sum. Of a program that jumps, only
    the loss may: large terms of it that cancel, as random numbers do."""
    forward = Block(program.forward.calls, program.losses)
    terms = plain_step(dataclasses.replace(program, forward=forward))
    metrics = jax.jit(lambda state, batch: terms(state, batch)[1])(whole, batch)
    size = sum(float(np.abs(np.float64(x)).sum()) for x in metrics["aux"])
    paths = [path for path, _ in jax.tree.leaves_with_path(expected)]
    ulp = float(np.finfo(np.float32).eps)
    return [ulp * size if str(path[-1]) == "['loss']" else 0.0 for path in paths]


def rounding(program: Program, whole: Any, batch: Any, expected: Any) -> list[float]:
    """Per result, how far the plain step is from itself in float64: as far, and three
    times as far on the other side, may the sharded one be."""

    def widened(x: Any) -> Any:
        return np.asarray(x, np.float64) if x.dtype == jnp.float32 else x

    keep, step = FORMS[program.form].keep, plain_step(program)
    with jax.enable_x64(True):
        true = jax.jit(lambda state, batch: keep(step(state, batch)))(
            *jax.tree.map(widened, (whole, batch))
        )
    return [
        4 / MARGIN * float(np.linalg.norm(np.float64(a) - np.float64(t)))
        if jnp.issubdtype(t.dtype, jnp.floating)
        else 0.0
        for a, t in zip(*map(jax.tree.leaves, (expected, true)), strict=True)
    ]


def rounded(x: jax.Array) -> Any:
    """Small integers, as the builder counts on; on the host, which compiles nothing."""
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    return np.clip(np.round(np.asarray(x)), -3, 3) if is_float else x


def _finite(x: jax.Array) -> bool:
    inexact = jnp.issubdtype(x.dtype, jnp.inexact)
    return not inexact or bool(np.isfinite(np.asarray(x)).all())
