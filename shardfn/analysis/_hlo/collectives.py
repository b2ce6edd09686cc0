"""The collectives of a compiled program.

In: compiled HLO text. Out: every collective that it runs, with sizes and repetitions.

Used to check a compiled program against its plan. Reads what XLA prints for CPU, GPU
and TPU. Where a backend rewrites a collective, the rewritten one is reported.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from shardfn._core.moves import AllReduce, ReduceScatter
from shardfn.analysis._hlo.collective import HloCollective, arrays, is_collective
from shardfn.analysis._hlo.loops import Frame, trip_count
from shardfn.analysis._hlo.parse import (
    Computation,
    Instruction,
    Module,
    behind,
    has_matmul,
    parse_module,
)

ASYNC = ("async-start", "call-start")
"""Starts of computations; those of `call-start` run on a TPU's sparse cores."""


@dataclass(frozen=True, slots=True)
class _Scope:
    """A computation being run, and how often."""

    frame: Frame
    module: Module
    times: int = 1
    exact: bool = True
    overlapped: bool = False

    @property
    def instructions(self) -> list[Instruction]:
        return list(self.frame.computation.instructions.values())


def read_collectives(hlo_text: str) -> tuple[HloCollective, ...]:
    """Reads the collectives that a compiled program runs.

    A combined collective gives one entry per array. A collective that the TPU compiler
    spreads over several fusions, and a reduce-scatter that it writes as an all-reduce
    and a slice in one fusion, give one entry. Each branch of a conditional counts once.

    Args:
      hlo_text: `jax.stages.Compiled.as_text()`.

    Returns:
      The collectives in the order of the text, callees in their caller's place.

    Raises:
      ValueError: the text is no HLO module, or holds a notation that is not understood.

    Example:
      >>> compiled = jax.jit(step).lower(state, batch).compile()
      >>> sum(c.times * c.wire_bytes for c in read_collectives(compiled.as_text()))
      1835008
    """
    module = parse_module(hlo_text)
    return tuple(_walk(_Scope(Frame(module.entry), module)))


def tally(
    collectives: Iterable[HloCollective],
) -> Counter[tuple[str, str, int, int]]:
    """Runs per step by `(op, dtype, elements, group_size)`.

    Loop peeling splits one collective of a loop in two: compare tallies, not tuples.
    """
    runs: Counter[tuple[str, str, int, int]] = Counter()
    for c in collectives:
        runs[c.op, c.dtype, c.elements, c.group_size] += c.times
    return runs


def wire_bytes(collectives: Iterable[HloCollective]) -> int:
    """Bytes each device sends in one step."""
    return sum(c.times * c.wire_bytes for c in collectives)


def overlapped_bytes(collectives: Iterable[HloCollective]) -> int:
    """The part of `wire_bytes` that moves while a matrix product runs.

    From the order of a scheduled GPU or TPU program; nothing overlaps on CPU.
    """
    return wire_bytes(c for c in collectives if c.overlapped)


def read_instruction(
    instr: Instruction, computation: Computation, module: Module
) -> list[HloCollective]:
    """The collectives of one instruction of a computation, run once."""
    scope = _Scope(Frame(computation), module)
    return list(_instruction(instr, scope, _spread(scope)))


def chains(computation: Computation, module: Module) -> dict[str, list[str]]:
    """The TPU's spread-out collectives: names of the fusions that each has a part in,
    in the order of the schedule."""
    scope = _Scope(Frame(computation), module)
    names = list(computation.instructions)
    spread = _spread(scope)
    return {c: [names[at] for at in parts] for c, parts in spread.items() if c}


def _walk(scope: _Scope) -> Iterator[HloCollective]:
    spread = _spread(scope)
    for instr in scope.instructions:
        yield from _instruction(instr, scope, spread)


def _instruction(
    instr: Instruction, scope: _Scope, spread: dict[str, list[int]]
) -> Iterator[HloCollective]:
    opcode = instr.opcode.removesuffix("-start")
    overlapped = scope.overlapped or _is_overlapped(instr, scope)
    if is_collective(instr):
        yield from _run(instr, scope, overlapped)
    elif opcode == "while":
        yield from _loop(instr, scope)
    elif opcode == "fusion":
        yield from _fusion(instr, scope, spread)
    elif opcode in ("conditional", "call", "async", "custom-call"):
        for inner in scope.module.called(instr):
            yield from _walk(replace(scope, frame=Frame(inner), overlapped=overlapped))


def _run(
    instr: Instruction, scope: _Scope, overlapped: bool
) -> Iterator[HloCollective]:
    for array in arrays(instr, scope.module):
        yield replace(
            array, times=scope.times, exact=scope.exact, overlapped=overlapped
        )


def _fusion(
    fusion: Instruction, scope: _Scope, spread: dict[str, list[int]]
) -> Iterator[HloCollective]:
    order = scope.instructions
    for computation, instr in _fused(fusion, scope.module):
        if chain := _chain(instr):
            first, last = spread[chain][0], spread[chain][-1]
            if order[first] is fusion:
                during = order[first : last + 1]
                hidden = any(has_matmul(i, scope.module) for i in during)
                yield from _run(instr, scope, hidden)
        elif _is_sliced(instr, computation):
            for array in _run(instr, scope, scope.overlapped):
                yield replace(array, op=ReduceScatter.op)
        else:
            yield from _run(instr, scope, scope.overlapped)


def _fused(
    fusion: Instruction, module: Module
) -> Iterator[tuple[Computation, Instruction]]:
    """The collectives inside a fusion, and the computations that hold them."""
    for inner in module.called(fusion, "calls"):
        for instr in inner.instructions.values():
            if is_collective(instr):
                yield inner, instr
            elif instr.opcode == "fusion":
                yield from _fused(instr, module)


def _spread(scope: _Scope) -> dict[str, list[int]]:
    """Where each of the TPU's spread-out collectives has a part: chain -> positions."""
    found: dict[str, list[int]] = {}
    for at, instr in enumerate(scope.instructions):
        if instr.opcode == "fusion":
            for _, inner in _fused(instr, scope.module):
                found.setdefault(_chain(inner), []).append(at)
    return found


def _chain(instr: Instruction) -> str:
    match = re.search(r'chain_id="(\d+)"', instr.attributes)
    return match[1] if match else ""


def _is_sliced(instr: Instruction, computation: Computation) -> bool:
    """Whether each device keeps only its part of an all-reduce: a reduce-scatter."""
    slices = computation.of("dynamic-slice")
    return instr.opcode in AllReduce.hlo_ops and any(
        behind(computation, s.operands[0]) is instr for s in slices
    )


def _is_overlapped(start: Instruction, scope: _Scope) -> bool:
    """Whether a matrix product is scheduled between `start` and its `-done`."""
    waits = start.opcode.endswith("-start")
    if not waits or not (is_collective(start) or start.opcode in ASYNC):
        return False
    order = scope.instructions
    begin = order.index(start)
    carriers = {start.name}
    for at in range(begin + 1, len(order)):
        if carriers & set(order[at].operands):
            if order[at].opcode.endswith("-done"):
                return any(has_matmul(i, scope.module) for i in order[begin + 1 : at])
            carriers.add(order[at].name)
    return False


def _loop(loop: Instruction, scope: _Scope) -> Iterator[HloCollective]:
    module, frame = scope.module, scope.frame
    trips = trip_count(loop, frame, module)
    exact = scope.exact and trips is not None
    tests, rounds = (1, 1) if trips is None else (trips + 1, trips)
    for role, runs in (("condition", tests), ("body", rounds)):
        inner = Frame(module.called(loop, role)[0], loop, frame)
        yield from _walk(_Scope(inner, module, scope.times * runs, exact))
