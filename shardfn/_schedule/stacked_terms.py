"""In which dtype a loop has made what it stacks.

In: a program, and a value that one of its loops stacks. Out: the dtype of the terms, if
the loop's body casts them to a wider one before it hands them out. A sum of such terms
is the same in either, but for rounding, and has fewer bytes in theirs.
"""

from typing import Any

from shardfn._core.program import Node, Program

CAST = "convert_element_type"


def term_dtype(program: Program, value: int) -> str | None:
    """The dtype of what a loop stacks, before its body casts it.

    Args:
      program: a program.
      value: one of its values.

    Returns:
      The name of the dtype; None if no loop stacks the value, or without a cast.
    """
    node = _maker(program, value)
    if node is None or node.kind != "scan":
        return None
    while node is not None and (node.kind == "scan" or node.is_call):
        (region,), (body,) = node.regions, node.bodies
        at = node.outputs.index(value)
        if node.kind == "scan" and at not in region.stacks:
            return None
        atom = body.outputs[at]
        if not isinstance(atom, int):
            return None
        program, value, node = body, atom, _maker(body, atom)
    if node is None or node.kind != "op" or node.eqn.primitive.name != CAST:
        return None
    (source,) = node.inputs
    return _dtype(program, source) if isinstance(source, int) else None


def _dtype(program: Program, value: int) -> str:
    aval: Any = program.avals[value]
    return str(aval.dtype)


def _maker(program: Program, value: int) -> Node | None:
    return next((node for node in program.nodes if value in node.outputs), None)
