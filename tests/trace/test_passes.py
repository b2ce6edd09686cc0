"""In: traced steps with several gradients. Out: of each equation the pass that it runs
in, of which gradient; whatever name scopes say.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardfn._core.phases import BACKWARD, FORWARD, UPDATE, Pass
from shardfn._core.program import Program
from shardfn._trace.dim_marks import FIXED, ROWS
from shardfn._trace.jaxpr_to_program import make_program
from shardfn._trace.passes import Argument

W = np.ones((4, 4), np.float32)
X = np.ones((6, 4), np.float32)
STATE, BATCH = Argument((FIXED, FIXED), state=True), Argument((ROWS, FIXED))

F, B, U = Pass(FORWARD), Pass(BACKWARD), Pass(UPDATE)
F2, B2, U2 = Pass(FORWARD, 1), Pass(BACKWARD, 1), Pass(UPDATE, 1)


def program_of(step: Callable, *args) -> Program:
    """The program of a step on parameters and then a batch."""
    arguments = [STATE] * (len(args) - 1) + [BATCH]
    return make_program(jax.make_jaxpr(step)(*args), arguments)


def passes_of(program: Program) -> list[Pass]:
    """The passes of a program and the bodies in it, each once, in order."""
    found: dict[Pass, None] = {}
    for node in program.nodes:
        found[node.during] = None
        for body in node.bodies:
            found.update(dict.fromkeys(passes_of(body)))
    return list(found)


def loss(w, x):
    return jnp.sum(jnp.tanh(x @ w) ** 2)


def descend(w, g):
    return w - 0.1 * g


def one(w, x):
    return descend(w, jax.grad(loss)(w, x))


def two(w, v, x):
    return one(w, x), one(v, x)


def two_vjps(w, v, x):
    """Both forward passes run before both backward passes: one of each."""
    (a, back_w), (b, back_v) = jax.vjp(loss, w, x), jax.vjp(loss, v, x)
    return back_w(b)[0], back_v(a)[0]


def in_loop(w, x):
    return lax.scan(lambda w, _: (one(w, x), None), w, length=2)[0]


def in_branch(w, v, x):
    w = one(w, x)
    return w, lax.cond(w[0, 0] > 0, lambda v: one(v, x), lambda v: v, v)


def remat(w, x):
    value, g = jax.value_and_grad(jax.checkpoint(loss))(w, x)
    return descend(w, g), value


def jitted(w, x):
    return jax.jit(descend)(w, jax.jit(jax.grad(jax.jit(loss)))(w, x))


def layers(w, x):
    def deep(w):
        return lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, length=3)[0].sum()

    return descend(w, jax.grad(deep)(w))


@jax.custom_vjp
def bent(x):
    return jnp.sin(x)


bent.defvjp(lambda x: (bent(x), x), lambda x, g: (g * jnp.cos(x),))


def custom(w, x):
    return descend(w, jax.grad(lambda w: bent(x @ w).sum())(w))


def mapped(w, x):
    grads = jax.vmap(jax.grad(lambda w, row: loss(w, row[None])), (None, 0))(w, x)
    return descend(w, grads.mean(0))


def linearized(w, x):
    _, tangent = jax.linearize(lambda w: loss(w, x), w)
    return descend(w, jax.linear_transpose(tangent, w)(1.0)[0])


def teacher_before(w, v, x):
    target = x @ v
    return descend(w, jax.grad(lambda w: ((x @ w - target) ** 2).sum())(w))


def teacher_after(w, v, x):
    return one(w, x), ((x.astype(jnp.float16) @ v.astype(jnp.float16)) ** 2).sum()


def evaluated(w, x):
    """The loss at the new parameters decides nothing."""
    w = one(w, x)
    return w, loss(w, x)


def guarded(w, x):
    """What the forward pass of a gradient measured is used by the update."""
    value, g = jax.value_and_grad(loss)(w, x)
    return jnp.where(jnp.isfinite(value), descend(w, g), w), g.sum()


def convolved(w, x):
    """A kernel's gradient has dimensions that neither operand has; none are rows."""

    def loss(w):
        image, kernel = x.reshape(6, 2, 2, 1), w.reshape(2, 2, 1, 4)
        numbers = ("NHWC", "HWIO", "NHWC")
        y = lax.conv_general_dilated(
            image, kernel, (1, 1), "SAME", dimension_numbers=numbers
        )
        return (y**2).sum()

    return descend(w, jax.grad(loss)(w))


def by_rows(w, x):
    """Metrics of each row after the gradient, without parameters."""
    (_, y), g = jax.value_and_grad(lambda w: (loss(w, x), x @ w), has_aux=True)(w)
    return descend(w, g), (jnp.argmax(y, -1) == 0).mean()


TABLE: list[tuple[Callable, list[Pass]]] = [
    (one, [F, B, U]),
    (two, [F, B, U, F2, B2, U2]),
    (two_vjps, [F, B]),
    (in_loop, [F, B, U]),
    (in_branch, [F, B, U, F2, B2, U2]),
    (remat, [F, B, U]),
    (jitted, [F, B, U]),
    (layers, [F, B, U]),
    (custom, [F, B, U]),
    (mapped, [F, B, U]),
    (linearized, [F, B, U]),
    (teacher_before, [F, B, U]),
    (teacher_after, [F, B, U, F2]),
    (evaluated, [F, B, U, F2]),
    (guarded, [F, B, U]),
    (convolved, [F, B, U]),
    (by_rows, [F, B, U]),
    (lambda w, x: loss(w, x), [F]),
]


@pytest.mark.parametrize("step, expected", TABLE)
def test_passes_belong_to_each_gradient(step: Callable, expected: list[Pass]) -> None:
    weights = step.__code__.co_argcount - 1
    assert passes_of(program_of(step, *[W] * weights, X)) == expected


# Gradients in gradients

INNER = Pass(FORWARD, 0, (BACKWARD,))
THROUGH = Pass(BACKWARD, 0, (BACKWARD,))


def penalized(w, x):
    """A penalty on the gradient by the input, as of WGAN."""

    def penalty(w):
        return (jax.grad(loss, 1)(w, x) ** 2).sum()

    return descend(w, jax.grad(penalty)(w))


def adapted(w, x):
    """An inner step, differentiated through, as of MAML."""
    return descend(w, jax.grad(lambda w: loss(one(w, x), x))(w))


@pytest.mark.parametrize("step", [penalized, adapted])
def test_a_gradient_inside_is_part_of_the_forward_pass(step: Callable) -> None:
    found = passes_of(program_of(step, W, X))
    assert found[0] == F and found[-1] == U
    assert set(found) == {F, INNER, B, THROUGH, U}


def test_what_jvp_alone_makes_is_part_of_no_gradient() -> None:
    """Forward over reverse: nothing transposes the outer `jvp`."""

    def curved(w, x):
        return jax.jvp(lambda w: jax.grad(loss)(w, x), (w,), (w,))[1]

    assert passes_of(program_of(curved, W, X)) == [F, B]
    forward = lambda w, x: jax.jvp(lambda w: loss(w, x), (w,), (w,))[1]  # noqa: E731
    assert passes_of(program_of(forward, W, X)) == [F]


# Names


def jvp(x):
    return jnp.tanh(x)


@pytest.mark.parametrize(
    "name", ["transpose(x)", "transpose(jvp(x))", "transpose", "jvp"]
)
def test_no_scope_misleads(name: str) -> None:
    def step(w, x):
        def named(w):
            with jax.named_scope(name):
                return (jax.named_call(jvp, name=name)(x @ w)).sum()

        with jax.named_scope(name):
            before = w * 2.0
        return descend(w, jax.grad(named)(before))

    assert passes_of(program_of(step, W, X)) == [F, B, U]
