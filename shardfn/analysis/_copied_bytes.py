"""What a compiled program copies between the memories, against its plan.

In: the plan's copies, and the program. Out: bytes in each direction, and which copies
come to the device before the gradient that they are to wait for.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardfn._core.limits import HOST_BLOCK_BYTES
from shardfn._core.line_names import line_names
from shardfn._core.memories import DEVICE, HOST
from shardfn.analysis._hlo.collective import jax_dtype
from shardfn.analysis._hlo.cost import arrays_of
from shardfn.analysis._hlo.host_copies import HostCopy, host_copy
from shardfn.analysis._hlo.loops import Frame, trip_count
from shardfn.analysis._hlo.parse import Instruction, Module, behind, integers
from shardfn.analysis._text import size_text
from shardfn.analysis.host_transfer import HostTransfer, LeafOnHost, copied


@dataclass(frozen=True, slots=True)
class CopiedBytes:
    """Bytes that each device copies to one memory per step.

    Attributes:
      memory: the memory, `device` or `host`.
      planned: by the plan.
      found: by the compiled program.
    """

    memory: str
    planned: int
    found: int

    def __str__(self) -> str:
        where = "to its host" if self.memory == HOST else "from its host"
        return (
            f"each device copies {size_text(self.found)} {where} per step; planned "
            f"{size_text(self.planned)}"
        )


def copied_bytes(
    transfers: Sequence[HostTransfer], module: Module
) -> tuple[CopiedBytes, ...]:
    """What is copied in each direction; nothing where a loop's iterations are not
    known."""
    copies = list(_copies(Frame(module.entry), module, 1))
    if not transfers or any(times is None for _, times in copies):
        return ()
    found = {DEVICE: 0, HOST: 0}
    for copy, times in copies:
        found[copy.memory] += copy.bytes * (times or 0)
    return tuple(CopiedBytes(m, copied(transfers, m), found[m]) for m in found)


def _copies(
    frame: Frame, module: Module, times: int | None
) -> Iterator[tuple[HostCopy, int | None]]:
    """The copies of a computation, and how often each runs."""
    for instr in frame.computation.instructions.values():
        copy = host_copy(instr, frame.computation)
        if copy is not None:
            yield copy, times
        elif instr.opcode == "while":
            trips = trip_count(instr, frame, module)
            inner = None if times is None or trips is None else times * trips
            body = Frame(module.called(instr, "body")[0], instr, frame)
            yield from _copies(body, module, inner)
        elif instr.opcode in ("conditional", "call"):
            for called in module.called(instr):
                yield from _copies(Frame(called), module, times)


def too_early(
    transfers: Sequence[HostTransfer], leaves: Sequence[LeafOnHost], module: Module
) -> Iterator[str]:
    """The whole leaves that a program copies to the device before what they are to wait
    for: they take the memory that the host was to free. A block's bytes may."""
    order = list(module.entry.instructions.values())
    starts = _first_copies(order, leaves, module)
    for t in transfers:
        start = starts.get(t.path)
        if t.blocks > 1 or t.memory == HOST or start is None or not t.waits_for:
            continue
        if t.bytes <= HOST_BLOCK_BYTES or _reads_before(t, transfers):
            continue
        done = (k for k, i in enumerate(order) if line_names(i.op_name) & t.waits_for)
        if start < max(done, default=-1):
            yield (
                f"{t.path}: {size_text(t.bytes)} come from the host before the "
                "gradient that they wait for"
            )


def _reads_before(t: HostTransfer, transfers: Sequence[HostTransfer]) -> bool:
    """Whether a leaf is copied to the device for an earlier pass, too."""
    return any(
        other.path == t.path and other.memory == DEVICE and not other.waits_for
        for other in transfers
    )


def _first_copies(
    order: Sequence[Instruction], leaves: Sequence[LeafOnHost], module: Module
) -> dict[str, int]:
    """Where in a schedule each leaf is first copied to the device as a whole; {} where
    the program's arguments on the host are not the leaves, one by one."""
    there = [i for i in order if i.opcode == "parameter" and "S(5)" in i.shape]
    there.sort(key=lambda i: integers(i.arguments)[0])
    forms = [(jax_dtype(a.dtype), a.dims) for i in there for a in arrays_of(i.shape)]
    if forms != [(leaf.dtype, leaf.shape) for leaf in leaves]:
        return {}
    names = {i.name: leaf.path for i, leaf in zip(there, leaves, strict=True)}
    found: dict[str, int] = {}
    for at, instr in enumerate(order):
        copy = host_copy(instr, module.entry)
        if copy is None or copy.memory != DEVICE or not instr.operands:
            continue
        source = _given(instr.operands[0], module)
        if source.name in names:
            found.setdefault(names[source.name], at)
    return found


def _given(name: str, module: Module) -> Instruction:
    """The instruction whose value `name` holds, also through barriers."""
    instr = behind(module.entry, name)
    if (at := instr.element) is None:
        return instr
    group = behind(module.entry, instr.operands[0])
    if group.opcode in ("opt-barrier", "optimization-barrier"):
        group = behind(module.entry, group.operands[0])
    return _given(group.operands[at], module) if group.opcode == "tuple" else instr
