"""What a compiler makes of an operation: a part of what reads it, a view, a pass of its
own, or one over the memory of an operand.

In: a node. Out: what its rule says of that; the plan's estimate of memory reads it.
"""

import jax.numpy as jnp

from shardfn._core.compat import ADDITIONS, primitives
from shardfn._core.owned_rows import add_owned_p
from shardfn._core.plan import Apply, HostStep, Step
from shardfn._core.program import ZERO, Node, Program, aval_of, number_of

_WRITES_INTO = (
    *primitives("scatter", "scatter-add", "scatter-sub", "scatter-mul"),
    *primitives("scatter-min", "scatter-max", "dynamic_update_slice"),
    add_owned_p,
)
_ADDS_INTO = primitives("scatter-add")
_PICKS = primitives("gather", "dynamic_slice")
_FILLS = primitives("broadcast_in_dim")
_COMPARES = primitives("gt", "ge", "lt", "le")


def is_view(program: Program, node: Node) -> bool:
    """Whether a node's result has the elements of its only operand."""
    if node.kind != "op" or node.rule is None or len(node.inputs) != 1:
        return False
    given, made = aval_of(program, node.inputs[0]), aval_of(program, node.outputs[0])
    alike = given.dtype == made.dtype and given.size == made.size
    return alike and bool(node.rule.linear)


def is_pointwise(node: Node) -> bool:
    """Whether each element of a result is made of one of each operand at most: of an
    operation, or of a function with a derivative of its own, which compilers inline."""
    if node.kind == "custom":
        return all(map(is_pointwise, node.bodies[-1].nodes))
    rule = node.rule
    if node.kind != "op" or rule is None or rule.reduce or node.eqn.effects:
        return False
    moved = rule.whole or rule.shifts or rule.blocks or rule.regroups
    return rule.flat or not moved


def fuses(node: Node, operand: int) -> bool:
    """Whether an operation may make an operand inside of it, each element where it is
    read."""
    if operand < 0:
        return False
    if node.kind != "op" or node.rule is None:
        return is_pointwise(node) or _is_unread(node, operand)
    if writes_into(node):
        return operand > 0 or adds_to_zeros(node)
    reduces = node.rule.flat or len(node.inputs) == 1
    return reduces or is_pointwise(node) or node.eqn.primitive in _PICKS


def _is_unread(node: Node, operand: int) -> bool:
    """Whether a function with a derivative of its own needs an operand for that alone:
    where it is called it reads nothing of it."""
    if node.kind != "custom":
        return False
    (body,), (region,) = node.bodies, node.regions
    values = [body.inputs[j] for j, i in enumerate(region.operands) if i == operand]
    read = [atom for inner in body.nodes for atom in inner.inputs]
    return bool(values) and {*values}.isdisjoint(map(number_of, (*read, *body.outputs)))


def makes_inside(program: Program, step: Step | HostStep, operand: int) -> bool:
    """Whether a step is an operation that may make an operand inside of it."""
    return isinstance(step, Apply) and fuses(program.nodes[step.node], operand)


def writes_into(node: Node) -> bool:
    """Whether a result has the elements of the first operand but for some."""
    return node.kind == "op" and node.eqn.primitive in _WRITES_INTO


def adds_to_zeros(node: Node) -> bool:
    """Whether it is a scatter that adds to zeros. XLA has no zeros then if only one
    addition reads it: it adds to the other term."""
    return node.eqn.primitive in _ADDS_INTO and node.kinds[0] == ZERO


def compares(node: Node) -> bool:
    """Whether it is a scatter that adds one number to each row of zeros, such as the
    gradient of picking a label's logit: an element is that number or zero, depending on
    its index."""
    if not adds_to_zeros(node):
        return False
    numbers = node.eqn.params["dimension_numbers"]
    made, _, added = (v.aval for v in node.eqn.invars)
    scattered = numbers.scatter_dims_to_operand_dims
    if not scattered:
        return False
    last = scattered[-1]
    return (
        not numbers.update_window_dims
        and len(numbers.operand_batching_dims) == made.ndim - 1  # pyright: ignore
        and added.size * made.shape[last] == made.size  # pyright: ignore
    )


def fills(program: Program, node: Node) -> bool:
    """Whether it makes an array of one number."""
    is_broadcast = node.kind == "op" and node.eqn.primitive in _FILLS
    return is_broadcast and aval_of(program, node.inputs[0]).size == 1


def tells_signs(node: Node) -> bool:
    """Whether it compares floats with one number, as the derivative of a ReLU does."""
    if node.kind != "op" or node.eqn.primitive not in _COMPARES:
        return False
    numbers, one = (v.aval for v in node.eqn.invars)
    is_float = jnp.issubdtype(numbers.dtype, jnp.floating)  # pyright: ignore
    return is_float and numbers.size > one.size == 1  # pyright: ignore


def adds(node: Node) -> bool:
    """Whether it is an addition."""
    return node.kind == "op" and node.eqn.primitive in ADDITIONS
