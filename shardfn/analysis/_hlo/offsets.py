"""At which bytes of a stack XLA for GPUs says that the part of an iteration begins,
and where it does begin.

In: the text of a compiled program. Out: every part that a loop reads or writes of a
stack, in some of its iterations, where XLA works out the byte ahead of time: it copies
such parts without a kernel. The text has both, the indices, which are computed here,
and the byte that XLA took.
"""

import itertools
import json
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass

from shardfn._core.reading_limits import OFFSET_ITERATIONS
from shardfn.analysis._hlo.cost import arrays_of, bits_of
from shardfn.analysis._hlo.parse import Instruction, integers, parse_module
from shardfn.analysis._hlo.scalars import Running

_CONFIG = '"dynamic_slice_config":'
_LAYOUT = re.compile(r"\[[\d,]*\]\{([\d,]+)")
_SLICE, _UPDATE = "dynamic-slice", "dynamic-update-slice"
_CALLS = ("fusion", "fusion-start", "call", "async-start", "conditional")


@dataclass(frozen=True, slots=True)
class Offset:
    """The byte at which a part begins in an iteration.

    Attributes:
      instruction: what reads or writes the part.
      writes: whether it writes it.
      op_name: the JAX call that it came from.
      iteration: the number of the iteration, from 0.
      said: the byte, as XLA says; None if it says it in a way that is not known here.
      true: the byte, by its indices; None if the text does not tell these.
    """

    instruction: str
    writes: bool
    op_name: str
    iteration: int
    said: int | None
    true: int | None

    @property
    def wrong(self) -> bool:
        """Whether both are known, and differ."""
        return None not in (self.said, self.true) and self.said != self.true


def offsets(text: str) -> list[Offset]:
    """What XLA says of where parts of stacks begin that loops read or write.

    Args:
      text: a compiled program.

    Returns:
      A value for each part and each iteration that is looked at; none for platforms
      whose compilers say nothing.
    """
    if _CONFIG not in text:
        return []
    module = parse_module(text)
    return list(_of_loops(Running(module, module.entry, {})))


def _of_loops(scope: Running) -> Iterator[Offset]:
    """The parts of the loops of a computation, and of what it calls."""
    for instr in scope.computation.instructions.values():
        if instr.opcode in _CALLS:
            for inner in scope.inside(instr):
                yield from _of_loops(inner)
        if instr.opcode != "while":
            continue
        for number, body in _looked_at(scope, instr):
            yield from (_offset(*part, number) for part in _parts(body))
            yield from _of_loops(body)


def _looked_at(scope: Running, loop: Instruction) -> Iterator[tuple[int, Running]]:
    """The first iterations of a loop, and the last one."""
    last = None
    for number, (body, runs) in enumerate(scope.iterations(loop)):
        if runs is not True:
            break
        last = number, body
        if number < OFFSET_ITERATIONS:
            yield last
    if last is not None and last[0] >= OFFSET_ITERATIONS:
        yield last


def _parts(scope: Running) -> Iterator[tuple[Running, Instruction]]:
    """Slices and updates in a computation, and in what it calls, of which XLA says
    where they begin."""
    for instr in scope.computation.instructions.values():
        if instr.opcode in _CALLS:
            for inner in scope.inside(instr):
                yield from _parts(inner)
        elif instr.opcode in (_SLICE, _UPDATE) and _CONFIG in instr.attributes:
            yield scope, instr


def _offset(scope: Running, instr: Instruction, number: int) -> Offset:
    said, true = _said(instr, number), _first_byte(scope, instr)
    writes = instr.opcode == _UPDATE
    return Offset(instr.name, writes, instr.op_name, number, said, true)


def _said(instr: Instruction, number: int) -> int | None:
    """The byte of an iteration of the loop around, as XLA writes it."""
    start = instr.attributes.index(_CONFIG) + len(_CONFIG)
    config, _ = json.JSONDecoder().raw_decode(instr.attributes, start)
    if int(config.get("loop_index", 0)):  # of another loop than the innermost
        return None
    if table := config.get("table"):
        at = table.get("offsets", ())
        return int(at[number]) if number < len(at) else None
    line = config.get("linear", config)
    if "byte_offset" not in line and "byte_stride" not in line:
        return None
    first, step = (int(line.get(f"byte_{name}", 0)) for name in ("offset", "stride"))
    return first + number * step


def _first_byte(scope: Running, instr: Instruction) -> int | None:
    """The byte at which a part begins: its indices, each clamped to the stack."""
    of, reads = scope.computation.instructions, instr.opcode == _SLICE
    stack, part = instr.operands[0], instr if reads else of[instr.operands[1]]
    [whole], [taken] = arrays_of(of[stack].shape), arrays_of(part.shape)
    indices = [scope.value(name) for name in instr.operands[1 if reads else 2 :]]
    if None in indices:
        return None
    layout = _LAYOUT.search(of[stack].shape)
    minor_first = integers(layout[1]) if layout else range(len(whole.dims))[::-1]
    sizes = [bits_of(whole.dtype), *(whole.dims[d] for d in minor_first)]
    strides = itertools.accumulate(sizes, operator.mul)
    bits = (
        stride * max(0, min(indices[d], whole.dims[d] - taken.dims[d]))
        for d, stride in zip(minor_first, strides, strict=False)
    )
    return sum(bits) // bits_of("u8")
