"""A program in which planning has chosen the sharding of some values, as if the user
had constrained them.

In: a program, where in it, and a function that constrains an array. Out: the program
with nodes that do.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from shardfn._core import compat
from shardfn._core.program import VALUE, Node, Program, number_of

NodePath = tuple[int, ...]
"""Where a node is: the first result of a node, which of its bodies, the first result of
a node in that, and so on."""

BodyPath = tuple[int, ...]
"""The same of a body: the first result of a node and which of its bodies, and so on."""


def with_result(
    program: Program, path: NodePath, constrain: Callable[[Any], Any]
) -> Program:
    """The program with the result of one node constrained.

    Args:
      program: the program.
      path: where the node is.
      constrain: of an array.

    Returns:
      The program.
    """
    *body, value = path

    def change(inner: Program) -> Program:
        at = next(i for i, n in enumerate(inner.nodes) if value in n.outputs[:1])
        node, new = inner.nodes[at], len(inner.avals)
        constraint = _constraint(node, inner.avals[value], new, value, constrain)
        nodes = replace(node, outputs=(new, *node.outputs[1:])), constraint
        return _with_values(
            inner, [value], (*inner.nodes[:at], *nodes, *inner.nodes[at + 1 :])
        )

    return in_body(program, tuple(body), change)


def with_operands(
    program: Program,
    body: BodyPath,
    values: Collection[int],
    readers: Collection[int],
    constrain: Callable[[Any], Any],
) -> Program:
    """The program with some values of one body constrained where some nodes read them.

    Args:
      program: the program.
      body: where the body is.
      values: its values.
      readers: the first results of the nodes.
      constrain: of an array.

    Returns:
      The program.
    """

    def change(inner: Program) -> Program:
        nodes: list[Node] = []
        moved: dict[int, int] = {}
        for node in inner.nodes:
            if node.outputs and node.outputs[0] in readers:
                read = dict.fromkeys(map(number_of, node.inputs))
                for value in (a for a in read if a in values and a not in moved):
                    moved[value] = len(inner.avals) + len(moved)
                    aval = inner.avals[value]
                    ends = value, moved[value]
                    nodes.append(_constraint(node, aval, *ends, constrain))
                inputs = (moved.get(number_of(a), a) for a in node.inputs)
                node = replace(node, inputs=tuple(inputs))
            nodes.append(node)
        return _with_values(inner, [*moved], tuple(nodes))

    return in_body(program, body, change)


def _constraint(
    near: Node,
    aval: Any,
    source: int,
    result: int,
    constrain: Callable[[Any], Any],
) -> Node:
    """The node that constrains a value, in the pass of another node."""
    return Node(
        eqn=compat.traced_equation(constrain, near.eqn, [aval]),
        inputs=(source,),
        outputs=(result,),
        kind="constrain",
        kinds=(VALUE,),
        during=near.during,
    )


def _with_values(
    program: Program, like: Collection[int], nodes: tuple[Node, ...]
) -> Program:
    """The program with these nodes and more values, each like one that it has."""
    leaves = (*program.leaves, *map(program.leaf, like)) if program.leaves else ()
    avals = (*program.avals, *(program.avals[value] for value in like))
    return replace(program, avals=avals, nodes=nodes, leaves=leaves)


def in_body(
    program: Program, path: BodyPath, change: Callable[[Program], Program]
) -> Program:
    """The program with one of its bodies changed, or itself."""
    if not path:
        return change(program)
    value, body, *rest = path
    at = next(i for i, n in enumerate(program.nodes) if value in n.outputs[:1])
    bodies = list(program.nodes[at].bodies)
    bodies[body] = in_body(bodies[body], tuple(rest), change)
    node = replace(program.nodes[at], bodies=tuple(bodies))
    nodes = (*program.nodes[:at], node, *program.nodes[at + 1 :])
    return replace(program, nodes=nodes)
