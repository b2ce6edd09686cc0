"""What a compiler may write over an operand.

In: one operation of a scheduled program, and its operands that nothing reads later.
Out: those of them whose memory its results may take: of which element `i` of a result
is made, and nothing else, and which lie in memory in the same way.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator

from shardfn.analysis._hlo.cost import FUSIONS, arrays_of, bits_of
from shardfn.analysis._hlo.parse import Computation, Instruction, Module, integers

_ELEMENTWISE = frozenset(
    "abs add and atan2 bitcast bitcast-convert cbrt ceil clamp compare convert copy "
    "cosine count-leading-zeros divide erf exponential exponential-minus-one floor "
    "is-finite log log-plus-one logistic maximum minimum multiply negate not or popcnt "
    "power real imag reduce-precision remainder round-nearest-afz round-nearest-even "
    "rsqrt select shift-left shift-right-arithmetic shift-right-logical sign sine sqrt "
    "subtract tan tanh xor".split()
)


def written_over(
    instr: Instruction, last: Collection[str], comp: Computation, module: Module
) -> Iterator[str]:
    """Names of the operands that an operation may write a result over, one for each of
    its results at most.

    Args:
      instr: the operation.
      last: those of its operands that nothing reads later, each alone in its memory.
      comp: where it runs.
      module: the program.
    """
    if instr.opcode in FUSIONS:
        yield from _of_fusion(instr, last, module)
    elif instr.opcode in _ELEMENTWISE:
        each = (name for name in instr.operands if name in last)
        fits = (n for n in each if _lies_alike(comp.instructions[n], instr))
        yield from itertools.islice(fits, 1)


def _of_fusion(
    fusion: Instruction, last: Collection[str], module: Module
) -> Iterator[str]:
    inside = module.called(fusion, "calls")[0]
    root = inside.root
    results = [*root.operands] if root.opcode == "tuple" else [root.name]
    users = defaultdict[str, list[Instruction]](list)
    for instr in inside.instructions.values():
        for name in instr.operands:
            users[name].append(instr)
    for instr in inside.instructions.values():
        if instr.opcode != "parameter" or not results:
            continue
        operand = fusion.operands[integers(instr.arguments)[0]]
        made = _made_elementwise(instr, root, users) if operand in last else ()
        for result in results if made else ():
            if result in made and _lies_alike(instr, inside.instructions[result]):
                results.remove(result)
                yield operand
                break


def _made_elementwise(
    parameter: Instruction, root: Instruction, users: dict[str, list[Instruction]]
) -> set[str]:
    """What is made of a parameter, if all of it is made element by element."""
    found, behind = set[str](), [parameter]
    count = _count(parameter.shape)
    while behind:
        for user in users.get(behind.pop().name, ()):
            if user.name in found or (user is root and user.opcode == "tuple"):
                continue
            if user.opcode not in _ELEMENTWISE or _count(user.shape) != count:
                return set()
            found.add(user.name)
            behind.append(user)
    return found


def _count(shape: str) -> int:
    arrays = arrays_of(shape)
    return arrays[0].elements if len(arrays) == 1 else 0


def _lies_alike(one: Instruction, other: Instruction) -> bool:
    """Whether two arrays take as much memory, and of one shape lie in it in one order:
    a copy may be there for that."""
    arrays = [arrays_of(each.shape) for each in (one, other)]
    if not all(len(each) == 1 for each in arrays):
        return False
    (a,), (b,) = arrays
    alike = a.elements == b.elements and bits_of(a.dtype) == bits_of(b.dtype)
    return alike and (a.dims != b.dims or a.layout == b.layout)
