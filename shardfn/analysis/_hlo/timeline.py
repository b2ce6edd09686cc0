"""When what would run at best.

In: a scheduled program and a machine's rates. Out: spans of time.

Plays the schedule on a machine that runs every operation at its roofline: the larger of
FLOPs over the peak rate and bytes over the memory's. Transfers run on the links, one at
a time, from their start on; the device waits where the schedule needs their result.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from shardfn._core.limits import PLAYED_ITERATIONS
from shardfn.analysis._hlo.collective import HloCollective, is_collective
from shardfn.analysis._hlo.collectives import ASYNC, chains, read_instruction
from shardfn.analysis._hlo.cost import Cost, cost_of
from shardfn.analysis._hlo.host_copies import HostCopy, host_copy
from shardfn.analysis._hlo.live import live_bytes
from shardfn.analysis._hlo.loops import Frame, trip_count
from shardfn.analysis._hlo.parse import Computation, Instruction, Module, parse_module

MATMUL, OTHER, WAIT, HOST_WAIT = "matmul", "other", "wait", "host_wait"


@dataclass(frozen=True, slots=True)
class Rates:
    """What a machine does per second.

    Attributes:
      matmul: FLOP/s by operand dtype.
      memory: bytes per second to and from device memory.
      transfer: seconds that a collective takes.
      host: bytes per second from or to the host's memory.
    """

    matmul: Callable[[str], float]
    memory: float
    transfer: Callable[[HloCollective], float]
    host: float = math.inf


@dataclass(frozen=True, slots=True)
class Span:
    """Something that runs from `start` to `end`, in seconds.

    Attributes:
      kind: `matmul`, `other`, `wait` or `host_wait` on the device; the collective's
        `op` on the links; `device` or `host` for copies to there.
      op_name: where in the user's program it comes from.
      bytes: that a transfer sends.
    """

    start: float
    end: float
    kind: str
    op_name: str = ""
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step, played.

    Attributes:
      device: what the device runs, in order.
      links: what moves meanwhile.
      copies: what moves between the host's memory and the device's.
      rounds: `(start, end, iteration)` of every iteration of the outermost loops.
      live: `(time, bytes)` of temporary memory, each until the next.
      seconds: until the last operation ends.
      flops: of all matmuls, by operand dtype.
      memory_bytes: read from and written to device memory.
    """

    device: tuple[Span, ...]
    links: tuple[Span, ...]
    rounds: tuple[tuple[float, float, int], ...]
    live: tuple[tuple[float, int], ...]
    seconds: float
    flops: Counter[str]
    memory_bytes: int
    copies: tuple[Span, ...] = ()

    @property
    def exposed(self) -> float:
        """Seconds that the device waits for transfers."""
        return sum(s.end - s.start for s in self.device if s.kind == WAIT)

    @property
    def transfers(self) -> float:
        """Seconds that the links are busy."""
        return sum(s.end - s.start for s in self.links)

    @property
    def host_exposed(self) -> float:
        """Seconds that the device waits for copies from and to the host."""
        return sum(s.end - s.start for s in self.device if s.kind == HOST_WAIT)

    def copied(self, memory: str) -> int:
        """Bytes that are copied to a memory."""
        return sum(s.bytes for s in self.copies if s.kind == memory)


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
    player.wait(player.links_free)
    player.wait(max(player.host_free.values(), default=0.0), HOST_WAIT)
    return Timeline(
        device=tuple(player.device),
        links=tuple(player.links),
        rounds=tuple(player.rounds),
        live=tuple(player.live),
        seconds=player.now,
        flops=player.flops,
        memory_bytes=player.memory_bytes,
        copies=tuple(player.copies),
    )


Arrival = tuple[float, str]
"""When the result of a transfer is there, and `WAIT` or `HOST_WAIT`."""


@dataclass(slots=True)
class _Player:
    """State while a program is played.

    `arrival` is when a transfer's result is there, by instruction, and as what the
    device waits for it; asynchronous operations pass it on to what ends them.
    `host_free` is when the link to each memory is free.
    """

    module: Module
    rates: Rates
    now: float = 0.0
    links_free: float = 0.0
    device: list[Span] = field(default_factory=list)
    links: list[Span] = field(default_factory=list)
    rounds: list[tuple[float, float, int]] = field(default_factory=list)
    live: list[tuple[float, int]] = field(default_factory=list)
    flops: Counter[str] = field(default_factory=Counter)
    memory_bytes: int = 0
    costs: dict[tuple[str, str], Cost] = field(default_factory=dict)
    alive: dict[str, dict[str, int]] = field(default_factory=dict)
    moves: dict[tuple[str, str], list[HloCollective]] = field(default_factory=dict)
    copies: list[Span] = field(default_factory=list)
    host_free: dict[str, float] = field(default_factory=dict)

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
            self.wait(*arrival.pop(ends.get(instr.name, ""), (0.0, WAIT)))

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
        if instr.opcode == "copy-start":
            return
        matmul = sum(n / rates.matmul(dtype) for dtype, n in cost.flops.items())
        seconds = max(matmul, cost.bytes / rates.memory)
        if seconds:
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
        end = self.send(moved) if moved else self.now
        started = [c for c, names in spread.items() if names[0] == instr.name]
        self.arrive(instr, arrival)
        if instr.opcode == "fusion":
            self.compute(instr, comp)
        if instr.opcode.endswith("-start"):
            arrival[instr.name] = end, WAIT
        elif started:
            arrival.update((chain, (end, WAIT)) for chain in started)
        else:
            self.wait(end)

    def send(self, moved: list[HloCollective]) -> float:
        """Puts transfers on the links; when the last of them is there."""
        for c in moved:
            start = max(self.now, self.links_free)
            self.links_free = start + self.rates.transfer(c)
            self.links.append(
                Span(start, self.links_free, c.op, c.op_name, c.wire_bytes)
            )
        return self.links_free

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
            arrival[instr.name] = end, HOST_WAIT
        else:
            self.wait(end, HOST_WAIT)

    def collectives(self, instr: Instruction, comp: Computation) -> list[HloCollective]:
        key = comp.name, instr.name
        if key not in self.moves:
            self.moves[key] = read_instruction(instr, comp, self.module)
        return self.moves[key]

    def arrive(self, instr: Instruction, arrival: dict[str, Arrival]) -> None:
        """What ends a transfer waits for it; what only carries it on does not."""
        for name in arrival.keys() & set(instr.operands):
            if instr.opcode.endswith("-done"):
                self.wait(*arrival.pop(name))
            else:
                arrival[instr.name] = arrival[name]

    def wait(self, until: float, kind: str = WAIT) -> None:
        if until > self.now:
            self.device.append(Span(self.now, until, kind))
            self.now = until

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
