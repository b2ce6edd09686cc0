"""In: control flow, each operand of a shape of its own. Out: a body's arguments and
results lie where its region says, and nothing else says where they lie.
"""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import shardfn
from shardfn._core.program import Node, aval_of
from shardfn._trace.jaxpr_to_program import make_program

PACKAGE = Path(shardfn.__file__).parent
KNOW_THE_LAYOUT = ("_core/regions.py", "_core/compat", "_trace/node_kinds.py")
COUNTS = (
    "num_consts",
    "num_carry",
    "cond_nconsts",
    "body_nconsts",
    "ft_in",
    "scan_counts",
    "of_scan",
    "of_while",
    "of_cond",
    "of_call",
)
A, B, C, D, E = (jnp.zeros(n) for n in (2, 3, 4, 5, 6))


def scanned(a, b, c, d, e):
    """Constants of 2 and 3, carries of 4 and 5, slices of `e`, stacks of 6 and 2."""

    def body(carry, x):
        c, d = carry
        return (c + a[0] * x, d + b[0]), (e * x, a * x)

    return lax.scan(body, (c, d), jnp.zeros(7))


def looped(a, b, c, d, e):
    """A test on `a`, a body on `b` and `e`, carries of 4 and 5."""

    def body(carry):
        return carry[0] + b[0], carry[1] * e[0]

    return lax.while_loop(lambda carry: carry[0][0] < a[0], body, (c, d))


def branched(a, b, c, d, e):
    one, other = (lambda a, b, c: (b * 2, c)), (lambda a, b, c: (b * a[0], -c))
    return lax.cond(e[0] > 0, one, other, a, b, c)


def called(a, b, c, d, e):
    return jax.checkpoint(lambda a, b, c: (c + a[0], b * a[1]))(a, b, c)


@jax.custom_jvp
def _ruled(a, b):
    return b * 2, a + b[0]


_ruled.defjvp(lambda primals, tangents: (_ruled(*primals), _ruled(*tangents)))


def ruled(a, b, c, d, e):
    return _ruled(a, b)


def nodes_of(fn: Callable[..., Any]) -> Iterator[tuple[Any, Node]]:
    program = make_program(jax.make_jaxpr(fn)(A, B, C, D, E))
    yield from ((program, node) for node in program.nodes if node.bodies)


@pytest.mark.parametrize(
    "fn, kind, constants, carries, slices, stacks",
    [
        (scanned, "scan", 3, 2, 1, 2),
        (looped, "while", 2, 2, 0, 0),
        (branched, "cond", 3, 0, 0, 0),
        (called, "remat", 3, 0, 0, 0),
        (ruled, "custom", 2, 0, 0, 0),
    ],
)
def test_arguments_and_results_are_those_of_the_node(
    fn, kind: str, constants: int, carries: int, slices: int, stacks: int
) -> None:
    ((program, node),) = nodes_of(fn)
    assert node.kind == kind and len(node.regions) == len(node.bodies)
    region = node.regions[-1]
    found = map(len, (region.constants, region.carries, region.slices, region.stacks))
    assert tuple(found) == (constants, carries, slices, stacks)
    for body, region in zip(node.bodies, node.regions, strict=True):
        operands = region.entering([aval_of(program, atom) for atom in node.inputs])
        for i, (value, outside) in enumerate(zip(body.inputs, operands, strict=True)):
            cut = int(i in region.slices)
            assert body.avals[value].shape == outside.shape[cut:]
        for j, result in region.returned():
            inner, cut = aval_of(body, body.outputs[j]), int(j in region.stacks)
            outside = program.avals[node.outputs[result]]
            assert inner.shape == outside.shape[cut:]
        for j, i in region.loops:
            inner = aval_of(body, body.outputs[j])
            assert inner.shape == body.avals[body.inputs[i]].shape
            assert i in region.carries
        assert [*region.constants, *region.carries, *region.slices] == list(
            range(len(body.inputs))
        )


def test_a_test_of_a_loop_returns_nothing() -> None:
    ((_, node),) = nodes_of(looped)
    test, body = node.regions
    assert test.results == (None,) and not test.loops and len(test.constants) == 1
    assert test.leaving(node.outputs, None) == [None]
    assert test.entering(node.inputs)[1:] == body.entering(node.inputs)[2:]


def test_nothing_else_knows_how_operands_lie() -> None:
    """No other module reads the counts of an equation, or takes one operand of control
    flow for its index."""
    for file in sorted(PACKAGE.rglob("*.py")):
        name = file.relative_to(PACKAGE).as_posix()
        if name.startswith(KNOW_THE_LAYOUT):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            word = getattr(node, "attr", getattr(node, "id", None))
            if isinstance(node, ast.Constant):
                word = node.value
            assert word not in COUNTS, f"{name}:{node.lineno} reads {word}"
