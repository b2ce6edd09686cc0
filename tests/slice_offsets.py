"""At which bytes of a stack XLA for GPUs says that the part of an iteration begins,
and where it does begin.

In: the text of a compiled program. Out: every part that a loop reads or writes of a
stack, in each iteration, where XLA works out the byte ahead of time, as it copies such
parts without a kernel. The text has both: the indices, which are computed here, and the
byte that XLA took.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardfn.analysis._hlo.parse import Computation, Instruction, Module, parse_module

BYTES = {"pred": 1, "s8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
CONFIG = re.compile(r'"dynamic_slice_config":(\{(?:[^{}]|\{[^{}]*\})*\})')
ARITHMETIC: Mapping[str, Callable[..., Any]] = {
    "add": lambda x, y: x + y,
    "subtract": lambda x, y: x - y,
    "multiply": lambda x, y: x * y,
    "minimum": min,
    "maximum": max,
    "and": lambda x, y: x & y,
    "select": lambda which, x, y: x if which else y,
}
COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "LT": lambda x, y: x < y,
    "LE": lambda x, y: x <= y,
    "GT": lambda x, y: x > y,
    "GE": lambda x, y: x >= y,
    "EQ": lambda x, y: x == y,
    "NE": lambda x, y: x != y,
}
SAME = ("copy", "bitcast", "convert", "reshape")
CALLS = ("fusion", "fusion-start", "call", "async-start")
MOST = 256
"""Iterations of a loop that are followed."""


@dataclass(frozen=True)
class Offset:
    """The byte at which a part begins in an iteration, as XLA says and as it is."""

    instruction: str
    iteration: int
    said: int
    true: int


@dataclass
class Scope:
    """Values of a computation's scalars, and of tuples of them; None if not known."""

    module: Module
    computation: Computation
    arguments: Mapping[int, Any]
    known: dict[str, Any] = field(default_factory=dict)

    def value(self, name: str) -> Any:
        if name not in self.known:
            self.known[name] = self._value(self.computation.instructions[name])
        return self.known[name]

    def inside(self, instr: Instruction, role: str | None = None) -> "Scope":
        """What `instr` calls, on its operands."""
        called = self.module.called(instr, *([role] if role else []))[0]
        return Scope(
            self.module, called, dict(enumerate(map(self.value, instr.operands)))
        )

    def _value(self, instr: Instruction) -> Any:
        opcode = instr.opcode
        if opcode == "parameter":
            return self.arguments.get(int(instr.arguments.split(",")[0]))
        if opcode == "constant":
            number = re.fullmatch(r"-?\d+", instr.arguments)
            words = {"true": True, "false": False}
            return int(number[0]) if number else words.get(instr.arguments)
        if opcode == "tuple":
            return tuple(map(self.value, instr.operands))
        if opcode == "get-tuple-element":
            found = re.search(r"index=(\d+)", instr.attributes)
            whole = self.value(instr.operands[0])
            return whole[int(found[1])] if found and whole is not None else None
        if opcode in SAME:
            return self.value(instr.operands[0])
        if opcode == "while":
            for _ in (states := iterations(self, instr)):
                pass
            return states.after
        scalar = "[]" in instr.shape
        if opcode in ("fusion", "call") and scalar:
            inner = self.inside(instr)
            return inner.value(inner.computation.root.name)
        given = [self.value(name) for name in instr.operands] if scalar else [None]
        if any(value is None for value in given):
            return None
        if opcode == "compare":
            direction = re.search(r"direction=(\w+)", instr.attributes)
            return COMPARISONS[direction[1]](*given) if direction else None
        return ARITHMETIC[opcode](*given) if opcode in ARITHMETIC else None


@dataclass
class iterations:
    """The bodies of a loop, one after the other, and then what it returns."""

    scope: Scope
    loop: Instruction
    after: Any = None

    def __iter__(self) -> Iterator[Scope]:
        state = self.scope.value(self.loop.operands[0])
        for _ in range(MOST):
            condition, body = (
                Scope(self.scope.module, called, {0: state})
                for role in ("condition", "body")
                for called in self.scope.module.called(self.loop, role)
            )
            if not condition.value(condition.computation.root.name):
                break
            yield body
            state = body.value(body.computation.root.name)
        self.after = state


def offsets(text: str) -> list[Offset]:
    """All that XLA says of a program's parts of stacks."""
    module = parse_module(text)
    entry = Scope(module, module.entry, {})
    return [
        offset for loop in module.entry.of("while") for offset in _of_loop(entry, loop)
    ]


def _of_loop(scope: Scope, loop: Instruction) -> Iterator[Offset]:
    for number, body in enumerate(iterations(scope, loop)):
        for part, instr in itertools.chain.from_iterable(_parts(body)):
            config = CONFIG.search(instr.attributes)
            if config is None:
                continue
            said = json.loads(config[1])
            said = said.get("linear", said)
            byte = int(said["byte_offset"]) + number * int(said["byte_stride"])
            yield Offset(instr.name, number, byte, _true(part, instr))
        for inner in body.computation.of("while"):
            yield from _of_loop(body, inner)


def _parts(scope: Scope) -> Iterator[Iterator[tuple[Scope, Instruction]]]:
    """Slices and updates in a computation, and in what it calls."""
    for instr in scope.computation.instructions.values():
        if instr.opcode in CALLS:
            yield from _parts(scope.inside(instr))
        elif instr.opcode in ("dynamic-slice", "dynamic-update-slice"):
            yield iter([(scope, instr)])


def _true(scope: Scope, instr: Instruction) -> int:
    """The byte at which a part begins: its indices, each clamped to the stack."""
    of = scope.computation.instructions
    reads = instr.opcode == "dynamic-slice"
    dtype, dims, layout = _array(of[instr.operands[0]].shape)
    taken = _array(instr.shape if reads else of[instr.operands[1]].shape)[1]
    indices = [scope.value(name) for name in instr.operands[1 if reads else 2 :]]
    assert None not in indices, f"{instr.name} begins at indices that are not known"
    inner = {d: layout[: layout.index(d)] for d in layout}
    strides = [BYTES[dtype] * int(np.prod([dims[e] for e in inner[d]])) for d in inner]
    strides = dict(zip(inner, strides, strict=True))
    return sum(
        max(0, min(index, dims[d] - taken[d])) * strides[d]
        for d, index in enumerate(indices)
    )


def _array(shape: str) -> tuple[str, list[int], list[int]]:
    """Dtype, dimensions, and these from the innermost in memory outwards."""
    found = re.match(r"(\w+)\[([\d,]*)\](?:\{([\d,]*))?", shape)
    assert found is not None, shape
    dims = [int(d) for d in found[2].split(",") if d]
    layout = [int(d) for d in (found[3] or "").split(",") if d]
    return found[1], dims, layout or list(reversed(range(len(dims))))
