"""Temporary memory over a schedule.

In: one scheduled HLO computation. Out: bytes at each instruction.

An estimate of what the compiler's buffer assignment comes to: values live from where
they are made to their last use, views and loop carries take no memory of their own.
"""

from __future__ import annotations

from shardfn.analysis._hlo.cost import FUSIONS, arrays_of
from shardfn.analysis._hlo.parse import Computation, Instruction, Module, integers

_NO_MEMORY = ("parameter", "constant", "after-all", "partition-id", "replica-id")
_ALIASES = (
    *("tuple", "bitcast", "while", "opt-barrier", "optimization-barrier"),
    *("dynamic-update-slice", "domain", "async-update"),
)


def live_bytes(comp: Computation, module: Module) -> dict[str, int]:
    """Bytes that are live while each instruction runs, its own result included.

    Arguments of the computation are not counted: they live outside of it. The results
    of the entry computation are written over donated arguments where there are any.
    """
    order = list(comp.instructions.values())
    buffers = _buffers(order, module)
    owned = {i.name: _own_bytes(i) for i in order if buffers[i.name] == {i.name}}
    if comp is module.entry and module.aliased:
        for at in module.aliased:
            if comp.root.opcode == "tuple" and at < len(comp.root.operands):
                for name in buffers[comp.root.operands[at]]:
                    owned[name] = 0
    last: dict[str, int] = {}
    for at, instr in enumerate(order):
        for name in (instr.name, *instr.operands):
            last.update((b, at) for b in buffers.get(name, ()))
    last.update((b, len(order)) for b in buffers[comp.root.name])
    ends: dict[int, list[str]] = {}
    for name, at in last.items():
        ends.setdefault(at, []).append(name)
    live, found = 0, {}
    for at, instr in enumerate(order):
        live += owned.get(instr.name, 0)
        found[instr.name] = live
        live -= sum(owned.get(name, 0) for name in ends.get(at, ()))
    return found


def _own_bytes(instr: Instruction) -> int:
    if instr.opcode in _NO_MEMORY:
        return 0
    made = arrays_of(instr.shape)
    if instr.opcode.endswith("-start") and len(made) > len(instr.operands):
        made = made[len(instr.operands) :]
    return sum(a.bytes for a in made)


def _buffers(order: list[Instruction], module: Module) -> dict[str, set[str]]:
    """Per instruction, those whose memory its value lies in."""
    found: dict[str, set[str]] = {}
    parts: dict[str, list[set[str]]] = {}
    for instr in order:
        of = [found.get(o, set()) for o in instr.operands]
        if instr.opcode == "tuple":
            parts[instr.name] = of
            found[instr.name] = set().union(*of)
        elif (at := instr.element) is not None:
            inside = parts.get(instr.operands[0])
            found[instr.name] = inside[at] if inside and at < len(inside) else of[0]
        elif instr.opcode == "while":
            parts[instr.name] = parts.get(instr.operands[0], [])
            found[instr.name] = of[0]
        elif instr.opcode.endswith("-done") or instr.opcode in _ALIASES:
            found[instr.name] = of[0] if of else {instr.name}
        elif at := _updated_operand(instr, module):
            found[instr.name] = of[at - 1]
        else:
            found[instr.name] = {instr.name}
    return found


def _updated_operand(instr: Instruction, module: Module) -> int:
    """One plus the operand that a fusion updates in place, or 0."""
    if instr.opcode not in FUSIONS:
        return 0
    inner = module.called(instr, "calls")[0]
    root = inner.root
    while root.opcode in ("bitcast", "copy") and root.operands:
        root = inner.instructions[root.operands[0]]
    if root.opcode != "dynamic-update-slice":
        return 0
    source = inner.instructions[root.operands[0]]
    while source.opcode in ("bitcast", "copy") and source.operands:
        source = inner.instructions[source.operands[0]]
    if source.opcode != "parameter":
        return 0
    return 1 + integers(source.arguments)[0]
