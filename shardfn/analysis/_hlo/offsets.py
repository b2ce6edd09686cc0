"""At which bytes of a stack XLA for GPUs says that the part of an iteration begins,
and where it does begin.

In: the text of a compiled program. Out: every part that a loop reads or writes of a
stack, in its first iterations, where XLA works out the byte ahead of time: it copies
such parts without a kernel. The text has both, the indices, which are computed here,
and the byte that XLA took.
"""

import itertools
import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardfn.analysis._hlo.cost import arrays_of, bits_of
from shardfn.analysis._hlo.parse import (
    Computation,
    Instruction,
    Module,
    integers,
    parse_module,
)

FOLLOWED = 8
"""Iterations of a loop that are followed. XLA says a first byte and a step, so that two
show a wrong one."""

_NAME = "dynamic_slice_config"
_CONFIG = re.compile(rf'"{_NAME}":(\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\}})')
_LAYOUT = re.compile(r"\[[\d,]*\]\{([\d,]+)")
_SLICE, _UPDATE = "dynamic-slice", "dynamic-update-slice"
_SAME = ("copy", "bitcast", "convert", "reshape")
_CALLS = ("fusion", "fusion-start", "call", "async-start")
_ARITHMETIC: Mapping[str, Callable[..., Any]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "and": operator.and_,
    "minimum": min,
    "maximum": max,
    "select": lambda which, first, second: first if which else second,
}
_COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
}


@dataclass(frozen=True, slots=True)
class Offset:
    """The byte at which a part begins in an iteration.

    Attributes:
      instruction: what reads or writes the part.
      writes: whether it writes it.
      op_name: the JAX call that it came from.
      iteration: the number of the iteration, from 0.
      said: the byte, as XLA says.
      true: the byte, by its indices.
    """

    instruction: str
    writes: bool
    op_name: str
    iteration: int
    said: int
    true: int


def offsets(text: str) -> list[Offset]:
    """All that XLA says of where parts of stacks begin.

    Args:
      text: a compiled program.

    Returns:
      A value for each part and iteration; none for indices that the text does not tell,
      and for platforms whose compilers say nothing.
    """
    if _NAME not in text:
        return []
    module = parse_module(text)
    entry = _Scope(module, module.entry, {})
    loops = module.entry.of("while")
    return [offset for loop in loops for offset in _of_loop(entry, loop)]


@dataclass(slots=True)
class _Scope:
    """A computation that runs: its scalars, and tuples of them; None if not known."""

    module: Module
    computation: Computation
    arguments: Mapping[int, Any]
    known: dict[str, Any] = field(default_factory=dict)

    def value(self, name: str) -> Any:
        if name not in self.known:
            self.known[name] = self._value(self.computation.instructions[name])
        return self.known[name]

    @property
    def result(self) -> Any:
        return self.value(self.computation.root.name)

    def inside(self, instr: Instruction) -> "_Scope":
        """What `instr` calls, on its operands."""
        [called, *_] = self.module.called(instr)
        return _Scope(
            self.module, called, dict(enumerate(map(self.value, instr.operands)))
        )

    def _value(self, instr: Instruction) -> Any:
        match instr.opcode:
            case "parameter":
                return self.arguments.get(*integers(instr.arguments))
            case "constant":
                return _constant(instr.arguments)
            case "tuple":
                return tuple(map(self.value, instr.operands))
            case "get-tuple-element":
                whole = self.value(instr.operands[0])
                return None if whole is None else whole[_index(instr)]
            case "while":
                return _Loop(self, instr).result
            case opcode if opcode in _SAME:
                return self.value(instr.operands[0])
        if not re.match(r"\w+\[\]", instr.shape):
            return None
        if instr.opcode in ("fusion", "call"):
            return self.inside(instr).result
        given = [self.value(name) for name in instr.operands]
        if None in given:
            return None
        if instr.opcode == "compare":
            direction = re.findall(r"direction=(\w+)", instr.attributes)[0]
            return _COMPARISONS[direction](*given)
        compute = _ARITHMETIC.get(instr.opcode)
        return compute(*given) if compute else None


@dataclass(slots=True)
class _Loop:
    """A `while` that runs in a scope."""

    scope: _Scope
    instruction: Instruction

    def iterations(self) -> Iterator[tuple[_Scope, bool]]:
        """The first iterations, and whether the loop ends before each."""
        state = self.scope.value(self.instruction.operands[0])
        for _ in range(FOLLOWED + 1):
            condition, body = (
                _Scope(self.scope.module, called, {0: state})
                for role in ("condition", "body")
                for called in self.scope.module.called(self.instruction, role)
            )
            yield body, condition.result is False
            if condition.result is not True:
                return
            state = body.result

    @property
    def result(self) -> Any:
        """What the loop returns; None if it does not end within these iterations."""
        *_, (after, ended) = self.iterations()
        return after.arguments[0] if ended else None


def _of_loop(scope: _Scope, instruction: Instruction) -> Iterator[Offset]:
    for number, (body, ended) in enumerate(_Loop(scope, instruction).iterations()):
        if ended or number == FOLLOWED:
            return
        for within, instr in _parts(body):
            config = _CONFIG.search(instr.attributes)
            true = _first_byte(within, instr) if config else None
            if config is None or true is None:
                continue
            line = json.loads(config[1])
            line = line.get("linear", line)
            said = int(line["byte_offset"]) + number * int(line["byte_stride"])
            writes = instr.opcode == _UPDATE
            yield Offset(instr.name, writes, instr.op_name, number, said, true)
        for inner in body.computation.of("while"):
            yield from _of_loop(body, inner)


def _parts(scope: _Scope) -> Iterator[tuple[_Scope, Instruction]]:
    """Slices and updates in a computation, and in what it calls."""
    for instr in scope.computation.instructions.values():
        if instr.opcode in _CALLS:
            yield from _parts(scope.inside(instr))
        elif instr.opcode in (_SLICE, _UPDATE):
            yield scope, instr


def _first_byte(scope: _Scope, instr: Instruction) -> int | None:
    """The byte at which a part begins: its indices, each clamped to the stack."""
    of, reads = scope.computation.instructions, instr.opcode == _SLICE
    stack, part = instr.operands[0], instr if reads else of[instr.operands[1]]
    [whole], [taken] = arrays_of(of[stack].shape), arrays_of(part.shape)
    indices = [scope.value(name) for name in instr.operands[1 if reads else 2 :]]
    if None in indices:
        return None
    layout = _LAYOUT.search(of[stack].shape)
    minor_first = integers(layout[1]) if layout else range(len(whole.dims))[::-1]
    sizes = [bits_of(whole.dtype) // 8, *(whole.dims[d] for d in minor_first)]
    strides = itertools.accumulate(sizes, operator.mul)
    return sum(
        stride * max(0, min(indices[d], whole.dims[d] - taken.dims[d]))
        for d, stride in zip(minor_first, strides, strict=False)
    )


def _constant(text: str) -> int | bool | None:
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    return {"true": True, "false": False}.get(text)


def _index(instr: Instruction) -> int:
    return integers(re.findall(r"\bindex=(\d+)", instr.attributes)[0])[0]
