"""Temporary memory over a schedule.

In: one scheduled HLO computation. Out: bytes at each instruction.

An estimate of what the compiler's buffer assignment comes to: values live from where
they are made to their last use, views and loop carries take no memory of their own, and
what is made element by element of an operand is written over it, if nothing reads it
behind that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from shardfn.analysis._hlo.cost import FUSIONS, arrays_of
from shardfn.analysis._hlo.in_place import written_over
from shardfn.analysis._hlo.parse import Computation, Instruction, Module, integers

_NO_MEMORY = ("parameter", "constant", "after-all", "partition-id", "replica-id")
_ALIASES = (
    *("bitcast", "opt-barrier", "optimization-barrier"),
    *("dynamic-update-slice", "scatter", "domain", "async-update"),
)
_BARRIERS = ("opt-barrier", "optimization-barrier", "while")

Buffers = frozenset[tuple[str, int]]
"""Memory, as the instructions that make what lies in it, and which of their arrays."""


def live_bytes(comp: Computation, module: Module) -> dict[str, int]:
    """Bytes that are live while each instruction runs, its own result included.

    Arguments of the computation are not counted: they live outside of it, and so do the
    results of one that is called, or is a loop's body. Those of the entry computation
    are written over donated arguments where there are any.
    """
    order = list(comp.instructions.values())
    values = _Values(module)
    for instr in order:
        values.add(instr)
    sizes = values.sizes | dict.fromkeys(_outside(comp, values, module), 0)
    last: dict[tuple[str, int], int] = {}
    for at, instr in enumerate(order):
        read: tuple[str, ...] = () if instr.element is not None else instr.operands
        if instr.opcode.endswith("-done"):  # until then a transfer reads
            read += comp.instructions[instr.operands[0]].operands
        for name in (instr.name, *read):
            last |= dict.fromkeys(values.buffers.get(name, ()), at)
    last |= dict.fromkeys(values.buffers[comp.root.name], len(order))
    ends: dict[int, Counter[tuple[str, int]]] = {}
    for buffer, at in last.items():
        ends.setdefault(at, Counter())[buffer] = sizes.get(buffer, 0)
    live, found = 0, {}
    for at, instr in enumerate(order):
        freed = ends.get(at, Counter())
        own = sum(sizes[b] for b in values.own.get(instr.name, ()))
        if own:
            ended = [
                name for name in instr.operands if values.alone(name, instr, freed)
            ]
            for name in written_over(instr, ended, comp, module):
                own -= sum(freed.pop(b, 0) for b in values.buffers[name])
        live += own
        found[instr.name] = live
        live -= freed.total()
    return found


def _outside(comp: Computation, values: _Values, module: Module) -> Buffers:
    """What lies in an argument's memory, or in that of what calls the computation."""
    if comp is not module.entry:
        return values.buffers[comp.root.name]
    made = comp.root.operands if comp.root.opcode == "tuple" else ()
    written = (made[at] for at in module.aliased if at < len(made))
    return frozenset[tuple[str, int]]().union(*(values.buffers[n] for n in written))


@dataclass(slots=True)
class _Values:
    """Where the values of a computation lie.

    Attributes:
      module: the program.
      buffers: per instruction, the memory that its value lies in.
      parts: the same for each element of tuples.
      own: per instruction, the memory that it takes.
      sizes: bytes.
    """

    module: Module
    buffers: dict[str, Buffers] = field(default_factory=dict)
    parts: dict[str, list[Buffers]] = field(default_factory=dict)
    own: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    sizes: dict[tuple[str, int], int] = field(default_factory=dict)

    def add(self, instr: Instruction) -> None:
        """The next instruction of the schedule."""
        of = [self.buffers.get(o, frozenset()) for o in instr.operands]
        if instr.opcode == "tuple":
            self.alias(instr, of)
        elif instr.opcode.endswith("-done") and instr.operands[0] in self.own:
            self.alias(instr, [frozenset({b}) for b in self.own[instr.operands[0]]])
        elif (at := instr.element) is not None:
            inside = self.parts.get(instr.operands[0], ())
            self.buffers[instr.name] = inside[at] if at < len(inside) else of[0]
        elif instr.opcode in _BARRIERS and instr.operands[0] in self.parts:
            self.alias(instr, self.parts[instr.operands[0]])
        elif instr.opcode.endswith("-done") or instr.opcode in (*_ALIASES, "while"):
            self.buffers[instr.name] = of[0] if of else frozenset({(instr.name, 0)})
        elif at := _updated_operand(instr, self.module):
            self.buffers[instr.name] = of[at - 1]
        else:
            self.make(instr)

    def alone(
        self, name: str, reader: Instruction, freed: Mapping[tuple[str, int], int]
    ) -> bool:
        """Whether all memory that an operand lies in is freed behind its reader, and no
        other operand of that lies there."""
        here = self.buffers.get(name, frozenset())
        sharing = [o for o in reader.operands if here & self.buffers.get(o, here)]
        return len(here) == len(sharing) == 1 and all(map(freed.get, here))

    def alias(self, instr: Instruction, parts: list[Buffers]) -> None:
        self.parts[instr.name] = parts
        self.buffers[instr.name] = frozenset().union(*parts)

    def make(self, instr: Instruction) -> None:
        sizes = _own_bytes(instr)
        own = [(instr.name, i) for i in range(len(sizes) or 1)]
        self.sizes |= zip(own, sizes or [0], strict=True)
        self.own[instr.name] = own
        self.alias(instr, [frozenset({buffer}) for buffer in own])
        if instr.opcode.endswith("-start"):
            del self.parts[instr.name]


def _own_bytes(instr: Instruction) -> list[int]:
    """Bytes of each array that an instruction makes."""
    if instr.opcode in _NO_MEMORY:
        return []
    made = arrays_of(instr.shape)
    if instr.opcode == "copy-start":  # what it makes comes first, unlike elsewhere
        return [made[0].bytes]
    if instr.opcode.endswith("-start") and len(made) > len(instr.operands):
        made = made[len(instr.operands) :]
    return [a.bytes for a in made]


def _updated_operand(instr: Instruction, module: Module) -> int:
    """One plus the operand that a fusion updates in place, or 0."""
    if instr.opcode not in FUSIONS:
        return 0
    inner = module.called(instr, "calls")[0]
    root = inner.root
    while root.opcode in ("bitcast", "copy") and root.operands:
        root = inner.instructions[root.operands[0]]
    if root.opcode not in ("dynamic-update-slice", "scatter"):
        return 0
    source = inner.instructions[root.operands[0]]
    while source.opcode in ("bitcast", "copy") and source.operands:
        source = inner.instructions[source.operands[0]]
    if source.opcode != "parameter":
        return 0
    return 1 + integers(source.arguments)[0]
