"""What a compiler may write over an operand.

In: one operation of a scheduled program. Out: the operands whose memory its results may
take, if nothing reads them later: those of which element `i` of a result is made, and
nothing else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

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
    instr: Instruction, comp: Computation, module: Module
) -> Iterator[str]:
    """Names of the operands that an operation may write a result over, one for each of
    its results at most."""
    if instr.opcode in FUSIONS:
        yield from _of_fusion(instr, module)
    elif instr.opcode in _ELEMENTWISE:
        alike = (
            name
            for name in instr.operands
            if _elements(comp.instructions[name].shape) == _elements(instr.shape)
        )
        yield from _first(alike)


def _of_fusion(fusion: Instruction, module: Module) -> Iterator[str]:
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
        made = _made_elementwise(instr, root, users)
        size = _elements(instr.shape)
        for result in results if made else ():
            if result in made and _elements(inside.instructions[result].shape) == size:
                results.remove(result)
                yield fusion.operands[integers(instr.arguments)[0]]
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


def _elements(shape: str) -> tuple[int, int]:
    """How many elements an array has, and the bits of one."""
    arrays = arrays_of(shape)
    return (
        (arrays[0].elements, bits_of(arrays[0].dtype)) if len(arrays) == 1 else (0, 0)
    )


def _first(names: Iterator[str]) -> Iterator[str]:
    yield from ([name] if (name := next(names, None)) is not None else [])
