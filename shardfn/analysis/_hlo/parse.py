"""HLO as a tree.

In: HLO text. Out: computations and their instructions.

Only what finding collectives needs is understood; the rest of a line stays text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_HEADER = re.compile(r"^\s*(ENTRY\s+)?%?([^\s(=]+)\s*(\(.*)?\{\s*$")
_END = re.compile(r'\s*\}\s*(,\s*execution_thread="[^"]*"\s*)?$')
_NAME = re.compile(r'^\s*(ROOT\s+)?%?([^\s="{}]+) = ')
_COMMENT = re.compile(r"/\*.*?\*/")
_OPERAND = re.compile(r"%?([\w.\-~]+)$")
_CALL = re.compile(
    r"\b(condition|body|calls|to_apply|true_computation|false_computation"
    r"|branch_computations|called_computations)=(?:\{([^}]*)\}|%?([\w.\-~]+))"
)
_LEAF = re.compile(r"\b([a-z]\w*)\[([\d,<= ]*)\]")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_LAYOUT = re.compile(r"\{[^{}]*\}")
_COPIES = ("copy", "bitcast", "copy-start", "copy-done")
_TRUTH = {"true": True, "false": False}
_MATMUL_TARGET = re.compile(r"cublas|__triton|cudnn\$|onednn\$matmul|gemm", re.I)


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a computation; `attributes` is the text after the operands."""

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    arguments: str
    attributes: str
    calls: Mapping[str, tuple[str, ...]]

    @property
    def op_name(self) -> str:
        """The JAX call that it came from, by its metadata."""
        named = re.search(r'op_name="([^"]*)"', self.attributes)
        return named[1] if named else ""

    @property
    def constant(self) -> int | None:
        """The integer or truth value that it is; None for other operations."""
        if self.opcode != "constant":
            return None
        is_number = re.fullmatch(r"-?\d+", self.arguments)
        return int(self.arguments) if is_number else _TRUTH.get(self.arguments)

    @property
    def element(self) -> int | None:
        """Which element of a tuple it takes; None for other operations."""
        if self.opcode != "get-tuple-element":
            return None
        return int(re.findall(r"\bindex=(\d+)", self.attributes)[0])


@dataclass(frozen=True, slots=True)
class Computation:
    """Instructions in text order, which is the schedule in a scheduled module."""

    name: str
    instructions: Mapping[str, Instruction]
    root: Instruction

    def of(self, opcode: str) -> list[Instruction]:
        """The instructions with this opcode."""
        return [i for i in self.instructions.values() if i.opcode == opcode]


@dataclass(frozen=True, slots=True)
class Module:
    """All computations by name, the devices that run the program, and which of its
    results may be written over an argument."""

    entry: Computation
    computations: Mapping[str, Computation]
    num_devices: int
    aliased: tuple[int, ...] = ()

    def called(self, instr: Instruction, *roles: str) -> list[Computation]:
        """Computations `instr` calls in the given roles, or in any."""
        names = [
            n for r, ns in instr.calls.items() if not roles or r in roles for n in ns
        ]
        return [self.computations[n] for n in names]


def parse_module(text: str) -> Module:
    """Reads the text of one HLO module, as `Compiled.as_text()` prints it."""
    computations: dict[str, Computation] = {}
    entry = name = None
    lines: list[str] = []
    for line in text.splitlines():
        if name is None:
            if header := _HEADER.match(line):
                name, lines = header[2], []
                entry = name if header[1] else entry
        elif _END.match(line):
            computations[name] = _computation(name, lines)
            name = None
        elif _NAME.match(line):
            lines.append(line)
        elif lines:  # text that a kernel has with it may take several lines
            lines[-1] += line
    if entry is None:
        raise ValueError("this is not the text of an HLO module: it has no ENTRY.")
    aliased = re.findall(r"\{(\d+)\}: \(\d+, ", text[: text.find("\n")])
    return Module(
        computations[entry],
        computations,
        _num_devices(text),
        tuple(map(int, aliased)),
    )


def leaves(shape: str) -> tuple[tuple[str, int], ...]:
    """`(f32[2,3]{1,0}, bf16[])` -> `(("f32", 6), ("bf16", 1))`."""
    return tuple(
        (dtype, math.prod(integers(dims)))
        for dtype, dims in _LEAF.findall(_LAYOUT.sub("", shape))
    )


def integers(text: str) -> list[int]:
    """`"{0,2},{1}"` -> `[0, 2, 1]`."""
    return [int(d) for d in re.findall(r"\d+", text)]


def behind(comp: Computation, name: str) -> Instruction:
    """The instruction whose value `name` holds, looking through copies."""
    instr = comp.instructions[name]
    while instr.opcode in _COPIES:
        instr = comp.instructions[instr.operands[0]]
    return instr


def has_matmul(instr: Instruction, module: Module) -> bool:
    """Whether running `instr` runs a matrix product or a convolution."""
    if instr.opcode in ("dot", "convolution"):
        return True
    target = re.search(r'custom_call_target="([^"]*)"', instr.attributes)
    if target and _MATMUL_TARGET.search(target[1]):
        return True
    inner = module.called(instr)
    return any(has_matmul(i, module) for c in inner for i in c.instructions.values())


def _computation(name: str, lines: Sequence[str]) -> Computation:
    instructions: dict[str, Instruction] = {}
    root: Instruction | None = None
    for line in lines:
        match = _NAME.match(line)
        assert match is not None
        instr = _instruction(match[2], _COMMENT.sub("", line[match.end() :]))
        instructions[instr.name] = instr
        root = instr if match[1] else root
    last = root if root is not None else next(reversed(instructions.values()))
    return Computation(name, instructions, last)


def _instruction(name: str, text: str) -> Instruction:
    shape_end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    shape, rest = text[:shape_end], text[shape_end:].lstrip()
    opcode, _, _ = rest.partition("(")
    end = _closing(rest, len(opcode))
    arguments, attributes = rest[len(opcode) + 1 : end - 1], rest[end:]
    operands = tuple(m[1] for a in _split(arguments) if (m := _OPERAND.search(a)))
    return Instruction(
        name, opcode.strip(), shape, operands, arguments, attributes, _calls(attributes)
    )


def _calls(attributes: str) -> dict[str, tuple[str, ...]]:
    return {
        role: tuple(n.strip(" %") for n in (many or one).split(",") if n.strip())
        for role, many, one in _CALL.findall(_STRING.sub('""', attributes))
    }


def _closing(text: str, start: int) -> int:
    """One past the bracket that closes the one at `start`."""
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] in "({[") - (text[at] in ")}]")
        if depth == 0:
            return at + 1
    raise ValueError(f"unbalanced brackets in HLO text: {text[start : start + 80]!r}.")


def _split(text: str) -> list[str]:
    """Splits on commas outside of brackets."""
    parts, depth = [""], 0
    for char in text:
        depth += (char in "({[") - (char in ")}]")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [p.strip() for p in parts if p.strip()]


def _num_devices(text: str) -> int:
    header = text[: text.find("\n")]
    found = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header)
    return math.prod(int(d) for d in found)
