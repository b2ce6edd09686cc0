"""Takes transposes of a tied weight into the matrix products that use them.

In: a program whose values are named after leaves. Out: the program, in which a weight
that the forward pass uses as `w` and as `w.T` is one value, so that its uses can share
a gather: `x @ w.T` contracts the other dimension of `w`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jax import lax

from shardfn._core import compat
from shardfn._core.equation_key import equation_key
from shardfn._core.program import Node, Program, aval_of, live
from shardfn._core.rule_registry import rule_of

USES = (lax.dot_general_p, lax.gather_p)
"""What a whole weight is gathered for."""


def fold_transposes(program: Program) -> Program:
    """Folds transposes of tied weights, also in the bodies of control flow.

    Args:
      program: the program.

    Returns:
      The program; the same one if there is nothing to fold.
    """
    tied = _tied(program)
    nodes = [_inside(_folded(program, node, tied)) for node in program.nodes]
    if all(new is old for new, old in zip(nodes, program.nodes, strict=True)):
        return program
    kept, constants = live(nodes, program.constants, program.outputs)
    return replace(program, nodes=kept, constants=constants)


def _tied(program: Program) -> dict[int, Node]:
    """The transposes, by what they make, of values of a state leaf that the forward
    pass uses as they are, too."""
    used: set[int] = set()
    made: dict[int, Node] = {}
    for node in program.nodes:
        values = [atom for atom in node.inputs if isinstance(atom, int)]
        if node.eqn.primitive is lax.transpose_p and values:
            if program.leaf(values[0]):
                made[node.outputs[0]] = node
        elif not node.backward and node.eqn.primitive in USES:
            used.update(values)
    return {value: node for value, node in made.items() if node.inputs[0] in used}


def _folded(program: Program, node: Node, tied: Mapping[int, Node]) -> Node:
    """A matrix product of what its transposed operands are made from."""
    if node.eqn.primitive is not lax.dot_general_p:
        return node
    contracting, batch = node.eqn.params["dimension_numbers"]
    inputs, dims = list(node.inputs), [list(contracting), list(batch)]
    for i, atom in enumerate(node.inputs):
        transpose = tied.get(atom) if isinstance(atom, int) else None
        if transpose is None:
            continue
        order = transpose.eqn.params["permutation"]
        taken = {*contracting[i], *batch[i]}
        free = [order[d] for d in range(len(order)) if d not in taken]
        if free != sorted(free):
            continue  # the result has the free dimensions in the operand's order
        inputs[i] = transpose.inputs[0]
        for kind in dims:
            kind[i] = tuple(order[d] for d in kind[i])
    if tuple(inputs) == node.inputs:
        return node
    params: Any = node.eqn.params | {"dimension_numbers": tuple(map(tuple, dims))}
    eqn = compat.traced_equation(
        lambda *xs: lax.dot_general_p.bind(*xs, **params),
        node.eqn,
        [aval_of(program, atom) for atom in inputs],
    )
    eqn_key, _ = equation_key(eqn, inputs)
    return replace(
        node, eqn=eqn, inputs=tuple(inputs), rule=rule_of(eqn), eqn_key=eqn_key
    )


def _inside(node: Node) -> Node:
    bodies = tuple(map(fold_transposes, node.bodies))
    same = all(new is old for new, old in zip(bodies, node.bodies, strict=True))
    return node if same else replace(node, bodies=bodies)
