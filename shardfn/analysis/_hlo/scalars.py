"""The scalars of a compiled program, as it runs.

In: computations. Out: the value of each scalar that the text tells, and of tuples of
such, in the iterations of loops.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardfn._core.reading_limits import SCALAR_ITERATIONS
from shardfn.analysis._hlo.cost import bits_of
from shardfn.analysis._hlo.parse import Computation, Instruction, Module, integers

_SAME = ("copy", "copy-start", "copy-done", "bitcast", "convert", "reshape")
_CALLS = ("fusion", "call")
_SCALAR = re.compile(r"\(?(\w+)\[\]")


def _quotient(of: int, by: int) -> int | None:
    """Rounded towards zero."""
    return None if by == 0 else abs(of) // abs(by) * (1 if of * by >= 0 else -1)


def _remainder(of: int, by: int) -> int | None:
    whole = _quotient(of, by)
    return None if whole is None else of - whole * by


_COMPUTE: Mapping[str, Callable[..., Any]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": _quotient,
    "remainder": _remainder,
    "negate": operator.neg,
    "abs": abs,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "minimum": min,
    "maximum": max,
    "clamp": lambda low, x, high: max(low, min(x, high)),
    "select": lambda which, first, second: first if which else second,
}
_COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
}


@dataclass(slots=True)
class Running:
    """A computation that runs; a value is None if it is not known.

    Attributes:
      module: the program.
      computation: what runs.
      arguments: the values of its parameters.
      left: how many iterations of loops may still run, one number for the program.
      known: the values of its instructions so far.
    """

    module: Module
    computation: Computation
    arguments: Mapping[int, Any]
    left: list[int] = field(default_factory=lambda: [SCALAR_ITERATIONS])
    known: dict[str, Any] = field(default_factory=dict)

    def value(self, name: str) -> Any:
        """A scalar, or a tuple of values."""
        if name not in self.known:
            self.known[name] = self._value(self.computation.instructions[name])
        return self.known[name]

    @property
    def result(self) -> Any:
        """What the computation returns."""
        return self.value(self.computation.root.name)

    def inside(self, instr: Instruction) -> list[Running]:
        """What an instruction calls: a branch of a conditional on its operand, another
        computation on all operands."""
        values = list(map(self.value, instr.operands))
        called = self.module.called(instr)
        if instr.opcode == "conditional":
            branches = zip(called, values[1:], strict=False)
            return [self._of(c, {0: value}) for c, value in branches]
        return [self._of(c, dict(enumerate(values))) for c in called[:1]]

    def _of(self, called: Computation, arguments: Mapping[int, Any]) -> Running:
        return Running(self.module, called, arguments, self.left)

    def iterations(self, loop: Instruction) -> Iterator[tuple[Running, bool | None]]:
        """A loop's iterations, and whether each runs, None if that is not known: the
        last one does not, and has what the loop returns as its argument."""
        state = self.value(loop.operands[0])
        condition, body = (
            self.module.called(loop, r)[0] for r in ("condition", "body")
        )
        while True:
            self.left[0] -= 1
            runs = self._of(condition, {0: state}).result if self.left[0] > 0 else None
            iteration = self._of(body, {0: state})
            yield iteration, runs
            if runs is not True:
                return
            state = iteration.result

    def _value(self, instr: Instruction) -> Any:
        opcode = instr.opcode
        if opcode == "parameter":
            return self.arguments.get(*integers(instr.arguments))
        if opcode == "tuple":
            return tuple(map(self.value, instr.operands))
        if (at := instr.element) is not None:
            whole = self.value(instr.operands[0])
            return whole[at] if isinstance(whole, tuple) else None
        if opcode == "while":
            *_, (after, runs) = self.iterations(instr)
            return after.arguments[0] if runs is False else None
        if opcode == "call":
            return self.inside(instr)[0].result
        scalar = _SCALAR.match(instr.shape)
        return _wrapped(self._scalar(instr), scalar[1]) if scalar else None

    def _scalar(self, instr: Instruction) -> Any:
        if instr.opcode == "constant":
            return instr.constant
        if instr.opcode in _CALLS:
            return self.inside(instr)[0].result
        if instr.opcode in _SAME:
            return self.value(instr.operands[0])
        if instr.opcode not in (*_COMPUTE, "compare"):
            return None
        given = [self.value(name) for name in instr.operands]
        if not given or not all(isinstance(value, int) for value in given):
            return None
        if instr.opcode == "compare":
            direction = re.findall(r"direction=(\w+)", instr.attributes)[0]
            return _COMPARE[direction](*given)
        return _COMPUTE[instr.opcode](*given)


def _wrapped(value: Any, dtype: str) -> Any:
    """An integer as its dtype holds it; None for numbers of other kinds."""
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if dtype[0] not in "su":
        return None
    size = 1 << bits_of(dtype)
    low = 0 if dtype[0] == "u" else -size // 2
    return (value - low) % size + low
