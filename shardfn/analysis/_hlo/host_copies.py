"""Copies between the host's memory and the device's in a compiled program.

In: an HLO instruction. Out: what it copies, and where to.

The host's memory is space 5 in layouts. Compilers slice what they copy, and write it
into a larger array, in one instruction with the copy: its bytes are those that cross.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from shardfn._core.memories import DEVICE, HOST
from shardfn.analysis._hlo.cost import FUSIONS, Array, arrays_of
from shardfn.analysis._hlo.parse import Computation, Instruction, Module

_HOST = re.compile(r"S\(5\)")
_CARRIERS = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while"),
    *("conditional", "call", "opt-barrier", "optimization-barrier", "after-all"),
)
_ALLOCATES = 'custom_call_target="AllocateBuffer"'
_COPIES = ("copy", "slice", "dynamic-slice", "dynamic-update-slice")


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A copy between the memories.

    Attributes:
      memory: where it goes to.
      bytes: that cross.
    """

    memory: str
    bytes: int


def host_copy(instr: Instruction, comp: Computation) -> HostCopy | None:
    """What an instruction copies; None if it is no copy between the memories."""
    if instr.opcode in _CARRIERS or instr.opcode.endswith("-done"):
        return None
    given = [a for o in instr.operands for a in _arrays(comp.instructions[o].shape)]
    made = _arrays(instr.shape)
    if not any(on_host for _, on_host in (*given, *made)):
        return None
    if instr.opcode.endswith("-start") and instr.opcode != "copy-start":
        made = made[len(given) :]  # behind the operands
    (result, to_host), *_ = made
    if not to_host:
        return HostCopy(DEVICE, _bytes(result))
    there = [_bytes(array) for array, on_host in given if not on_host]
    return HostCopy(HOST, max(there)) if there else None


def lives_on_host(instr: Instruction, comp: Computation) -> bool:
    """Whether an instruction reads or makes something in the host's memory, and does
    not only hand it on, or take memory there that copies write to."""
    if instr.opcode in _CARRIERS or instr.opcode.endswith("-done"):
        return False
    if instr.opcode == "custom-call" and _ALLOCATES in instr.attributes:
        return False
    shapes = (instr.shape, *(comp.instructions[o].shape for o in instr.operands))
    return any(map(_HOST.search, shapes))


def is_copy(instr: Instruction, comp: Computation, module: Module) -> bool:
    """Whether an instruction copies between the memories, or cuts out what it copies,
    or writes it into a larger array; a fusion, if all that it holds does. A copy from
    the host to the host is none: it is made where two need one array."""
    if instr.opcode in (*FUSIONS, "async-start"):
        inner = [i for c in module.called(instr) for i in c.instructions.values()]
        host = [i for i in inner if _HOST.search(i.shape)]
        return all(i.opcode in (*_COPIES, *_CARRIERS) for i in host)
    if instr.opcode in ("copy", "copy-start"):
        return host_copy(instr, comp) is not None
    return instr.opcode.removesuffix("-start") in _COPIES


def _arrays(shape: str) -> Sequence[tuple[Array, bool]]:
    """The arrays in the text of a shape, and which are in the host's memory."""
    parts = re.findall(r"\b[a-z]\w*\[[\d,<= ]*\](?:\{[^{}]*\})?", shape)
    return [
        (array, bool(_HOST.search(part))) for part in parts for array in arrays_of(part)
    ]


def _bytes(array: Array) -> int:
    return Array(array.dtype, array.dims).bytes
