"""Values of a program that are computed alike, and that a compiler merges.

In: a program, and which of its arguments are alike. Out: for each of its values the
first one that is computed in the same way from the same operands.
"""

import math
from collections.abc import Hashable, Mapping, Sequence

from shardfn._core.compat import ADDITIONS
from shardfn._core.program import ZERO, Node, Program, number_of

NESTED = ("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or")
"""Reductions that compilers write as one where one is of another's result."""


def computed_alike(program: Program, arguments: Mapping[int, int]) -> Mapping[int, int]:
    """Numbers values: two have one number if the same ops make them. What compilers
    write in one way counts as the same: squares, sums in either order, sums with zero,
    a reduction of a reduction, and elements that get their shape back. What control
    flow makes has a number of its own.

    Args:
      program: of which values are numbered.
      arguments: of its arguments, the first one that is the same; missing if none is.

    Returns:
      For each value its number, which is that of the first value made so.
    """
    first = {value: value for value in range(len(program.avals))} | dict(arguments)
    seen: dict[Hashable, tuple[int, ...]] = {}
    reduced: dict[int, _Reduced] = {}
    zeros: set[int] = set()
    elements: dict[int, int] = {}
    for node in program.nodes:
        if node.kind != "op" or node.eqn.effects:
            continue
        numbers = [first.get(number_of(a), number_of(a)) for a in node.inputs]
        others = _without_zeros(node, numbers, zeros)
        name = node.eqn.primitive.name
        if not others and name in ("square", "mul"):
            zeros.update(node.outputs)
        if len(others) == 1 and others[0] in first and _adds(node):
            first[node.outputs[0]] = others[0]
            continue
        key: Hashable = _key(node, numbers)
        if numbers and numbers[0] >= 0 and keeps_elements(node):
            (out,) = node.outputs
            of = elements[out] = elements.get(numbers[0], numbers[0])
            shapes = [getattr(program.avals[x], "shape", ()) for x in (of, out)]
            if shapes[0] == shapes[1]:
                first[out] = of
                continue
            key = "elements", of, shapes[1]
        if name in NESTED and numbers[0] >= 0:
            key = reduced[node.outputs[0]] = _reduction(node, numbers[0], reduced)
        made = seen.setdefault(key, node.outputs)
        first.update(zip(node.outputs, made, strict=True))
    return first


def keeps_elements(node: Node) -> bool:
    """Whether an op gives the elements of its operand another shape, or the same one,
    and leaves them in their order."""
    name, params = node.eqn.primitive.name, node.eqn.params
    shape = getattr(node.eqn.invars[0].aval, "shape", ())
    if name in ("reshape", "squeeze", "expand_dims"):
        return params.get("dimensions") is None or name != "reshape"
    if name == "transpose":
        moved = [d for d in params["permutation"] if shape[d] != 1]
        return moved == sorted(moved)
    if name == "unstack":  # of JAX 0.12
        return len(node.outputs) == 1
    if name == "rev":
        return all(shape[d] == 1 for d in params["dimensions"])
    made = getattr(node.eqn.outvars[0].aval, "shape", ())
    if name == "slice":
        return shape == made
    return name == "broadcast_in_dim" and math.prod(shape) == math.prod(made) > 0


_Reduced = tuple[str, int, tuple[int, ...]]
"""A reduction, the number of what it reduces, and the dimensions that are left."""


def _reduction(node: Node, number: int, reduced: Mapping[int, _Reduced]) -> _Reduced:
    """A reduction of one of the same kind is one of what that reduces."""
    name, axes = node.eqn.primitive.name, node.eqn.params["axes"]
    shape = getattr(node.eqn.invars[0].aval, "shape", ())
    left: Sequence[int] = range(len(shape))
    if number in reduced and reduced[number][0] == name:
        _, number, left = reduced[number]
    return name, number, tuple(d for i, d in enumerate(left) if i not in axes)


def _without_zeros(
    node: Node, numbers: Sequence[int], zeros: set[int]
) -> Sequence[int]:
    pairs = zip(numbers, node.kinds, strict=True)
    return [a for a, kind in pairs if kind != ZERO and a not in zeros]


def _adds(node: Node) -> bool:
    return node.eqn.primitive in ADDITIONS


def _key(node: Node, numbers: Sequence[int]) -> Hashable:
    """What an op computes, of operands with these numbers."""
    name = node.eqn.primitive.name
    of_itself = name == "mul" and numbers[0] == numbers[1] >= 0
    of_two = name == "integer_pow" and node.eqn.params["y"] == 2
    if name == "square" or of_itself or of_two:
        return "square", numbers[0]
    if _adds(node) and min(numbers) >= 0:  # literals are in the equation's key
        return "add", *sorted(numbers)
    return id(node.eqn_key or node), *numbers
