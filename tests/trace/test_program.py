"""In: traced functions. Out: programs with calls inlined, equal equations merged, dead
ones dropped, zeros known, and the backward pass marked.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardfn._core.phases import BACKWARD, FORWARD, UPDATE, Pass
from shardfn._core.program import ZERO, Node, Program, last_pass
from shardfn._trace.jaxpr_to_program import make_program

X = np.ones((4, 4), np.float32)


def program_of(function, *args) -> Program:
    return make_program(jax.make_jaxpr(function)(*args))


def names(program: Program) -> list[str]:
    return [node.eqn.primitive.name for node in program.nodes]


def only(program: Program, kind: str) -> Node:
    (node,) = [node for node in program.nodes if node.kind == kind]
    return node


# Calls


@jax.custom_jvp
def clipped(x):
    return jnp.minimum(x, 1.0)


@clipped.defjvp
def _clipped_jvp(primals, tangents):
    return clipped(*primals), tangents[0] * 2.0


@jax.custom_vjp
def scaled(x):
    return jnp.sin(x)


scaled.defvjp(lambda x: (scaled(x), x), lambda x, g: (g * jnp.cos(x),))


@pytest.mark.parametrize(
    "function, expected",
    [
        (jax.jit(lambda x: jnp.sin(x)), ["sin"]),
        (jax.jit(jax.jit(lambda x: jnp.sin(x) + x)), ["sin", "add"]),
        (jax.named_call(jnp.sin, name="layer"), ["sin"]),
    ],
)
def test_calls_are_inlined(function, expected) -> None:
    assert names(program_of(function, X)) == expected


@pytest.mark.parametrize(
    "platform, expected", [("cpu", "sin"), ("tpu", "cos"), ("cuda", "tan"), ("", None)]
)
def test_only_the_branch_of_the_platform_is_there(platform, expected) -> None:
    def on_platforms(x):
        return lax.platform_dependent(x, cpu=jnp.sin, tpu=jnp.cos, default=jnp.tan)

    def fn(x):
        return lax.scan(lambda c, _: (on_platforms(c), None), x, None, length=3)[0]

    program = make_program(jax.make_jaxpr(fn)(X), platform=platform)
    body = only(program, "scan").bodies[0]
    all_of_them = ["platform_index", "cond"]
    assert names(body) == ([expected, "only_on"] if expected else all_of_them)


@pytest.mark.parametrize(
    "function, expected",
    [(clipped, ["min"]), (scaled, ["sin"]), (jax.jit(jax.nn.relu), ["max"])],
)
def test_functions_with_their_own_derivative_stay_calls(function, expected) -> None:
    node = only(program_of(function, X), "custom")
    assert names(node.bodies[0]) == expected


def test_calls_are_inlined_in_control_flow() -> None:
    def body(carry, x):
        return jax.jit(lambda x: jnp.minimum(x, 1.0))(carry + x), None

    program = program_of(lambda x: lax.scan(body, x[0], x)[0], X)
    assert names(only(program, "scan").bodies[0]) == ["add", "min"]


def test_constants_of_inlined_calls_are_kept() -> None:
    table = jnp.arange(16, dtype=jnp.float32).reshape(4, 4)
    program = program_of(jax.jit(lambda x: jax.jit(lambda y: y + table)(x)), X)
    arrays = [np.asarray(value) for _, value in program.constants]
    assert names(program) == ["add"]
    assert len(arrays) == 1 and np.array_equal(arrays[0], table)


# Equal equations


def test_equal_equations_are_merged_also_across_calls() -> None:
    def twice(x):
        return jax.jit(jnp.sin)(x) + jax.jit(lambda y: jnp.sin(y) * 2.0)(x)

    assert names(program_of(twice, X)) == ["sin", "mul", "add"]


@pytest.mark.parametrize(
    "function, name",
    [
        (lambda x: x[:2] + x[2:], "slice"),
        (lambda x: x * 2.0 + x * 3.0, "mul"),
        (lambda x: jnp.sum(x, 0) + jnp.sum(x, 1), "reduce_sum"),
        (lambda x: x * 1.0 + x * -1.0, "mul"),
        (lambda x: lax.mul(x, 0.0) + lax.mul(x, -0.0), "mul"),
    ],
)
def test_other_parameters_or_literals_are_not_equal(function, name) -> None:
    program = program_of(function, X)
    assert names(program).count(name) == 2, names(program)


def test_equations_on_literals_are_not_merged_but_equal() -> None:
    """Each consumer makes its own; what is computed from them is still equal."""

    def fill(x):
        same = (jnp.ones((4, 4)) + x) * (jnp.ones((4, 4)) + x)
        return same + jnp.ones((4, 4)) * x

    found = names(program_of(fill, X))
    assert found.count("broadcast_in_dim") == 2, "one for the sum, one for the product"
    assert found.count("add") == 2


def test_a_tree_that_is_moved_is_moved_leaf_by_leaf() -> None:
    """Leaves of an offloaded optimizer state have no dimension in common."""

    def moved(x):
        return jax.device_put({"a": x, "b": x[0]}, jax.memory.Space.Device)

    puts = [n for n in program_of(moved, X).nodes if n.rule and len(n.inputs) == 1]
    assert [str(n.rule) for n in puts][-2:] == ["a b -> a b", "a -> a"]


def test_barriers_and_names_are_not_merged() -> None:
    def twice(x):
        a, b = lax.optimization_barrier(x), lax.optimization_barrier(x)
        return a + b

    assert names(program_of(twice, X)).count("optimization_barrier") == 2


def test_merging_does_not_change_results() -> None:
    def twice(x):
        return jnp.sin(x) * 2.0 + jnp.sin(x) * 3.0, jnp.sin(x)

    program = program_of(twice, X)
    env = {program.inputs[0]: jnp.asarray(X)}
    for node in program.nodes:
        args = [env[a] if isinstance(a, int) else a.val for a in node.inputs]
        args = [jnp.asarray(a, jnp.float32) for a in args]
        out = node.eqn.primitive.bind(*args, **node.eqn.params)
        env.update(zip(node.outputs, [out], strict=True))
    for atom, expected in zip(program.outputs, twice(X), strict=True):
        np.testing.assert_allclose(env[atom], expected, rtol=1e-6)


# Dead code


def test_dead_code_is_dropped() -> None:
    def step(x):
        jnp.cos(x) @ x
        return jnp.sin(x)

    assert names(program_of(step, X)) == ["sin"]


def test_dead_code_in_a_loop_is_dropped() -> None:
    def body(carry, x):
        a, b = carry
        return (jnp.sin(a), jnp.cos(b)), b * 2.0

    def step(x):
        (a, _), _ = lax.scan(body, (x, x), None, length=3)
        return a

    scan = only(program_of(step, X), "scan")
    assert names(scan.bodies[0]) == ["sin"]
    assert len(scan.outputs) == 1


def test_dead_constants_are_dropped() -> None:
    table = jnp.arange(4.0)
    program = program_of(lambda x: (x + table, x)[1], X)
    assert program.constants == () and program.nodes == ()
    assert program.outputs == program.inputs


# Zeros


def made_kind(function) -> str:
    """What a program knows of the value that `function` makes: see `Node.kinds`."""
    program = program_of(lambda x: jnp.sin(function(x).astype(jnp.float32)), X)
    return program.nodes[-1].kinds[0]


@pytest.mark.parametrize(
    "function, is_zero",
    [
        (lambda x: jnp.zeros((4, 4)), True),
        (lambda x: jnp.zeros((2, 8)).reshape(4, 4), True),
        (lambda x: jnp.zeros((4, 4), jnp.bfloat16).astype(jnp.float32), True),
        (lambda x: jnp.broadcast_to(jnp.zeros(4), (4, 4)), True),
        (lambda x: jnp.ones((4, 4)), False),
        (lambda x: jnp.zeros((4, 4)) + x, False),
        (lambda x: x.reshape(2, 8), False),
    ],
)
def test_zeros_are_known(function, is_zero: bool) -> None:
    assert (made_kind(function) == ZERO) is is_zero


def test_literals_that_a_call_takes_are_told_apart() -> None:
    """The same inner equation, called with two literals, is two equations."""

    def f(x):
        spread = jax.jit(lambda low, like: jnp.full(like.shape, low) + like)
        return spread(0.0, x) - spread(1.0, x)

    program = program_of(f, X)
    assert sum(n.eqn.primitive.name == "broadcast_in_dim" for n in program.nodes) == 2


def test_zeros_are_zero() -> None:
    """A literal is looked at by value, whatever its dtype."""
    for dtype in (jnp.int32, jnp.float32, jnp.bfloat16, jnp.bool_):
        for value in (0, 1):
            kind = made_kind(lambda x, v=value, d=dtype: lax.full((4,), v, d))
            assert (kind == ZERO) == (value == 0), dtype


# Control flow


@pytest.mark.parametrize("consts, carries", [(0, 1), (1, 1), (0, 2), (2, 0), (2, 3)])
def test_scan_counts(consts: int, carries: int) -> None:
    def step(c, init, xs):
        def body(carry, x):
            return tuple(a * 2.0 + sum(c) for a in carry), x + sum(c)

        return lax.scan(body, init, xs)

    args = ((X[0],) * consts, (X[0],) * carries, X)
    node = only(program_of(step, *args), "scan")
    (region,) = node.regions
    assert (len(region.constants), len(region.carries)) == (consts, carries)
    assert len(node.inputs) == len(node.bodies[0].inputs) == consts + carries + 1


def test_while_counts_and_bodies() -> None:
    def step(limit, a, b, x):
        return lax.while_loop(
            lambda c: jnp.sum(c) < limit, lambda c: c + a * b, x.astype(jnp.float32)
        )

    node = only(program_of(step, np.float32(9), X, X, X), "while")
    assert [len(region.constants) for region in node.regions] == [1, 2]
    assert [names(body)[-1] for body in node.bodies] == ["lt", "add"]


def test_cond_has_one_body_per_branch() -> None:
    def step(i, x):
        return lax.switch(i, [jnp.sin, jnp.cos, lambda y: y * 2.0], x)

    node = only(program_of(step, np.int32(0), X), "cond")
    assert [names(body) for body in node.bodies] == [["sin"], ["cos"], ["mul"]]


def test_remat_and_barrier() -> None:
    def loss(x):
        return jnp.sum(jax.checkpoint(lambda y: jnp.sin(jnp.sin(y)))(x))

    program = program_of(jax.grad(loss), X)
    assert only(program, "remat").backward
    barrier = only(program_of(lambda x: lax.optimization_barrier(x), X), "barrier")
    assert barrier.bodies == ()


# The backward pass


def step_of_all_phases(w, x):
    grad = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)
    return w - 0.1 * grad


def test_backward_flags_and_phases() -> None:
    program = program_of(step_of_all_phases, X, X)
    phases = [node.during.phase for node in program.nodes]
    order = {FORWARD: 0, BACKWARD: 1, UPDATE: 2}
    assert [order[p] for p in phases] == sorted(order[p] for p in phases)
    assert set(phases) == set(order)
    for node, phase in zip(program.nodes, phases, strict=True):
        assert node.backward == (phase == BACKWARD)
    assert names(program)[-1] == "sub" and phases[-1] == UPDATE


def test_no_node_is_backward_without_autodiff() -> None:
    program = program_of(lambda w, x: jnp.sum(x @ w.T), X, X)
    assert not any(node.backward for node in program.nodes)
    assert {node.during for node in program.nodes} == {Pass(FORWARD)}


def test_bodies_of_backward_loops_are_backward() -> None:
    def loss(w, x):
        return jnp.sum(lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=3)[0])

    scans = [n for n in program_of(jax.grad(loss), X, X).nodes if n.kind == "scan"]
    assert [n.backward for n in scans] == [False, True]
    for scan in scans:
        assert {n.backward for n in scan.bodies[0].nodes} == {scan.backward}


def test_a_loop_over_whole_microbatches_ends_in_the_backward_phase() -> None:
    def step(w, xs):
        return lax.scan(lambda w, x: (step_of_all_phases(w, x), None), w, xs)[0]

    program = program_of(step, X, jnp.stack([X, X]))
    scan = only(program, "scan")
    assert not scan.backward
    assert last_pass(scan) == Pass(BACKWARD)
