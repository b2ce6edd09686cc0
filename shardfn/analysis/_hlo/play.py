"""When what would run at best.

In: a scheduled program and a machine's rates. Out: spans of time.

Plays the schedule on a machine that runs every operation at its roofline: the larger of
FLOPs over the peak rate and bytes over the memory's, and a gap before the next. Bytes
of transfers occupy their links, one transfer at a time, from their start on, and are
there a latency later; the device waits where the schedule needs their result.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from shardfn._core.reading_limits import PLAYED_ITERATIONS
from shardfn.analysis._hlo.collective import (
    HloCollective,
    is_collective,
    is_synchronous,
)
from shardfn.analysis._hlo.collectives import ASYNC, chains, read_instruction
from shardfn.analysis._hlo.cost import Cost, cost_of
from shardfn.analysis._hlo.host_copies import HostCopy, host_copy
from shardfn.analysis._hlo.live import live_bytes
from shardfn.analysis._hlo.loops import Frame, trip_count
from shardfn.analysis._hlo.parse import Computation, Instruction, Module, parse_module
from shardfn.analysis._hlo.timeline import (
    HOST_WAIT,
    MATMUL,
    OTHER,
    WAIT,
    Rates,
    Span,
    Timeline,
)


def play(hlo_text: str, rates: Rates) -> Timeline:
    """Plays one step of a scheduled program.

    Args:
      hlo_text: the optimized program, as `jax.stages.Compiled.as_text()` prints it.
      rates: the machine.

    Returns:
      The timeline. Branches of a conditional are played one after another.
    """
    module = parse_module(hlo_text)
    player = _Player(module, rates)
    player.run(Frame(module.entry), 0, depth=0)
    player.wait(player.sent)
    last = max(player.host_free.values(), default=0.0)
    player.wait(Arrival(last, kind=HOST_WAIT))
    return Timeline(
        device=tuple(player.device),
        links=tuple(player.links),
        rounds=tuple(player.rounds),
        live=tuple(player.live),
        seconds=player.now,
        flops=player.flops,
        memory_bytes=player.memory_bytes,
        quantizer_bytes=player.quantizer_bytes,
        copies=tuple(player.copies),
        kernels=player.kernels,
        latency=player.latency,
        durations=tuple(player.durations.items()),
    )


class Arrival(NamedTuple):
    """When the result of a transfer is there, of which collective, and whether the
    device waits for it (`WAIT`) or for the host (`HOST_WAIT`)."""

    time: float
    op: str = ""
    kind: str = WAIT


@dataclass(slots=True)
class _Player:
    """State while a program is played.

    `arrival` is when a transfer's result is there, by instruction; asynchronous
    operations pass it on to what ends them. `sent` is when that of the last transfer
    is, `links_free` when each kind of links is, `host_free` the link to each memory.
    """

    module: Module
    rates: Rates
    now: float = 0.0
    links_free: dict[str, float] = field(default_factory=dict)
    sent: Arrival = Arrival(0.0)
    device: list[Span] = field(default_factory=list)
    links: list[Span] = field(default_factory=list)
    rounds: list[tuple[float, float, int]] = field(default_factory=list)
    live: list[tuple[float, int]] = field(default_factory=list)
    flops: Counter[str] = field(default_factory=Counter)
    memory_bytes: int = 0
    quantizer_bytes: int = 0
    costs: dict[tuple[str, str], Cost] = field(default_factory=dict)
    alive: dict[str, dict[str, int]] = field(default_factory=dict)
    moves: dict[tuple[str, str], list[HloCollective]] = field(default_factory=dict)
    copies: list[Span] = field(default_factory=list)
    host_free: dict[str, float] = field(default_factory=dict)
    kernels: int = 0
    latency: float = 0.0
    durations: dict[str, float] = field(default_factory=dict)

    def run(self, frame: Frame, below: int, depth: int) -> None:
        """Plays a computation on top of `below` bytes of live memory."""
        comp = frame.computation
        if comp.name not in self.alive:
            self.alive[comp.name] = live_bytes(comp, self.module)
        alive: dict[str, int] = self.alive[comp.name]
        arrival: dict[str, Arrival] = {}
        spread = chains(comp, self.module)
        ends = {names[-1]: chain for chain, names in spread.items()}
        for instr in comp.instructions.values():
            self.mark(below + alive[instr.name])
            opcode = instr.opcode
            if opcode == "while":
                self.loop(instr, frame, below + alive[instr.name], depth)
            elif opcode in ("call", "conditional"):
                for inner in self.module.called(instr):
                    self.run(Frame(inner), below + alive[instr.name], depth + 1)
            elif (copied := host_copy(instr, comp)) is not None:
                self.copy(copied, instr, arrival)
            elif is_collective(instr) or opcode in (*ASYNC, "fusion"):
                self.transfer(instr, comp, arrival, spread)
            else:
                self.arrive(instr, arrival)
                self.compute(instr, comp)
            self.wait(arrival.pop(ends.get(instr.name, ""), Arrival(0.0)))

    def mark(self, live: int) -> None:
        if not self.live or self.live[-1][1] != live:
            self.live.append((self.now, live))

    def compute(self, instr: Instruction, comp: Computation) -> None:
        key = comp.name, instr.name
        if key not in self.costs:
            self.costs[key] = cost_of(instr, comp, self.module)
        cost, rates = self.costs[key], self.rates
        self.flops += cost.flops
        self.memory_bytes += cost.bytes
        self.quantizer_bytes += cost.bytes if cost.quantizes else 0
        if instr.opcode == "copy-start":
            return
        matmul = sum(n / rates.matmul(dtype) for dtype, n in cost.flops.items())
        seconds = max(matmul, cost.bytes / rates.memory)
        if seconds:
            seconds += rates.gap
            self.durations[instr.name] = seconds
            self.kernels += 1
            kind = MATMUL if cost.flops else OTHER
            end = self.now + seconds
            self.device.append(Span(self.now, end, kind, instr.op_name))
            self.now = end

    def transfer(
        self,
        instr: Instruction,
        comp: Computation,
        arrival: dict[str, Arrival],
        spread: dict[str, list[str]],
    ) -> None:
        """Starts what an instruction moves, and waits unless something else ends it: a
        `-done`, or the last of the fusions that the TPU spreads it over."""
        moved = self.collectives(instr, comp)
        started = [c for c, names in spread.items() if names[0] == instr.name]
        alone = not started and is_synchronous(instr)
        if moved:
            self.durations[instr.name] = self.rates.transfer(moved).seconds
        end = self.send(moved, alone) if moved else Arrival(self.now)
        self.arrive(instr, arrival)
        if instr.opcode == "fusion":
            self.compute(instr, comp)
        if instr.opcode.endswith("-start"):
            arrival[instr.name] = end
        elif started:
            arrival.update((chain, end) for chain in started)
        else:
            self.wait(end)

    def send(self, moved: list[HloCollective], alone: bool) -> Arrival:
        """Puts the arrays of one collective on the links; when they are there. `alone`
        if nothing else can run meanwhile."""
        taken = self.rates.transfer(moved)
        rate = sum(c.wire_bytes for c in moved) / taken.links if taken.links else 0
        end = max((self.links_free.get(k, 0.0) for k in taken.over), default=0.0)
        end = max(self.now, end)
        for c in moved:
            start, end = end, end + (c.wire_bytes / rate if rate else 0.0)
            span = Span(start, end, c.op, c.op_name, c.wire_bytes, over=taken.over)
            self.links.append(replace(span, alone=alone))
        self.links_free.update(dict.fromkeys(taken.over, end))
        self.latency += taken.latency
        end = Arrival(end + taken.latency, moved[0].op)
        self.sent = max(self.sent, end)
        return end

    def copy(
        self, copied: HostCopy, instr: Instruction, arrival: dict[str, Arrival]
    ) -> None:
        """Starts a copy from or to the host, and waits for it unless a `-done` does."""
        memory = copied.memory
        start = max(self.now, self.host_free.get(memory, 0.0))
        end = self.host_free[memory] = start + copied.bytes / self.rates.host
        self.copies.append(Span(start, end, memory, instr.op_name, copied.bytes))
        self.arrive(instr, arrival)
        if instr.opcode.endswith("-start"):
            arrival[instr.name] = Arrival(end, kind=HOST_WAIT)
        else:
            self.wait(Arrival(end, kind=HOST_WAIT))

    def collectives(self, instr: Instruction, comp: Computation) -> list[HloCollective]:
        key = comp.name, instr.name
        if key not in self.moves:
            self.moves[key] = read_instruction(instr, comp, self.module)
        return self.moves[key]

    def arrive(self, instr: Instruction, arrival: dict[str, Arrival]) -> None:
        """What ends a transfer waits for it; what only carries it on does not."""
        for name in arrival.keys() & set(instr.operands):
            if instr.opcode.endswith("-done"):
                self.wait(arrival.pop(name))
            else:
                arrival[instr.name] = arrival[name]

    def wait(self, end: Arrival) -> None:
        if end.time > self.now:
            span = Span(self.now, end.time, end.kind, waits_for=end.op)
            self.device.append(span)
            self.now = end.time

    def loop(self, loop: Instruction, outer: Frame, below: int, depth: int) -> None:
        """Plays a loop's body as often as it runs; once if that is not known."""
        trips = trip_count(loop, outer, self.module)
        body = Frame(self.module.called(loop, "body")[0], loop, outer)
        count, start = 1 if trips is None else trips, self.now
        for i in range(min(count, PLAYED_ITERATIONS)):
            start = self.now
            self.run(body, below, depth + 1)
            if depth == 0:
                self.rounds.append((start, self.now, i))
        rest = (count - PLAYED_ITERATIONS) * (self.now - start)
        if rest > 0:
            self.device.append(Span(self.now, self.now + rest, OTHER, loop.op_name))
            self.now += rest
