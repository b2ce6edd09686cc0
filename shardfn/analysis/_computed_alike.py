"""Values of a program that are computed alike, and that a compiler merges.

In: a program. Out: for each of its values the first one that is computed in the same
way from the same operands.
"""

from collections.abc import Hashable, Mapping, Sequence

from shardfn._core.compat import ADDITIONS
from shardfn._core.program import ZERO, Node, Program, number_of


def computed_alike(program: Program) -> Mapping[int, int]:
    """Numbers values: two have one number if the same ops make them. What compilers
    write in one way counts as the same: squares, sums in either order, and sums with
    zero. What control flow makes has a number of its own."""
    first = {value: value for value in range(len(program.avals))}
    seen: dict[Hashable, tuple[int, ...]] = {}
    zeros: set[int] = set()
    for node in program.nodes:
        if node.kind != "op" or node.eqn.effects:
            continue
        numbers = [first.get(number_of(a), number_of(a)) for a in node.inputs]
        others = _without_zeros(node, numbers, zeros)
        if not others and node.eqn.primitive.name in ("square", "mul"):
            zeros.update(node.outputs)
        if len(others) == 1 and others[0] in first and _adds(node):
            first[node.outputs[0]] = others[0]
            continue
        made = seen.setdefault(_key(node, numbers), node.outputs)
        first.update(zip(node.outputs, made, strict=True))
    return first


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
