"""Which values of a plan live at once on a device.

In: a program and its plan. Out: bytes, step by step: what a compiler fuses into what
reads it, views, and what it writes in place of something else take none.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shardfn._core.memories import HOST
from shardfn._core.plan import (
    Apply,
    BlockLoop,
    BodyPlan,
    HostStep,
    Ref,
    Reshard,
    Step,
    Transfer,
    reads,
)
from shardfn._core.program import Node, Program
from shardfn._core.sharding import Axes, Sharding, local_shape
from shardfn._core.sizes import bytes_in, local_bytes, signs_in_byte
from shardfn._core.tile_limits import TPU_TILE
from shardfn._schedule import fusion
from shardfn._schedule.cast_stacks import cast_stacks
from shardfn._schedule.delayed_sums import delayed_sums
from shardfn._schedule.heap import Heap
from shardfn._schedule.made_bytes import (
    exported,
    moved_bytes,
    results_of,
    version_bytes,
)
from shardfn._schedule.stacked_casts import narrow_dtypes


@dataclass(slots=True)
class Liveness:
    """The values of one body.

    Attributes:
      program: the program.
      body: its plan.
      axes: the mesh axes.
      heap: what the compiler does with memory.
      made: per version, the step that makes it and its bytes.
      results: per step, the versions that it makes.
      readers: per version, the steps that read it, and as which operand; -1 for none.
      out: versions that are handed out.
      known: see `roots`.
      within: per node, what is live in its bodies.
      results_of: versions that are results of the node whose body this is, and the
        argument that holds each before, of a loop: None for a call.
    """

    program: Program
    body: BodyPlan
    axes: Axes
    heap: Heap
    made: dict[Ref, tuple[Step | HostStep, int]] = field(default_factory=dict)
    results: list[list[Ref]] = field(default_factory=list)
    readers: dict[Ref, list[tuple[Step | HostStep, int]]] = field(default_factory=dict)
    out: set[Ref] = field(default_factory=set)
    known: dict[Ref, frozenset[Ref]] = field(default_factory=dict)
    within: dict[int, int] = field(default_factory=dict)
    results_of: dict[Ref, Ref | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        steps, outputs = self.body.run
        self.out.update(self.body.leaving)
        for step in steps:
            made = {ref: (step, size) for ref, size in self.makes(step)}
            self.made.update(made)
            self.results.append([*made])
            operands = step.operands if isinstance(step, Apply) else ()
            for ref in reads(step):
                at = operands.index(ref) if ref in operands else -1
                self.readers.setdefault(ref, []).append((step, at))
        aliased = self.body.aliased
        others = {ref for j, ref in enumerate(outputs) if j not in aliased}
        inside = {ref for ref in self.results_of if self.is_counted_outside(ref)}
        for ref in {outputs[j] for j in aliased} - others | inside:
            if ref is not None and ref in self.made:
                self.made[ref] = self.made[ref][0], 0

    def profile(self) -> list[int]:
        """While each step runs, the bytes of what the body makes that live; 0 in the
        end, so that there is one."""
        steps, _ = self.body.run
        last: dict[Ref, int] = {}
        for i, step in enumerate(steps):
            for ref in reads(step):
                last.update(dict.fromkeys(self.roots(ref), i))
        last.update((r, len(steps)) for ref in self.out for r in self.roots(ref))
        ends: dict[int, set[Ref]] = {}
        for ref, at in last.items():
            ends.setdefault(at, set()).add(ref)
        live: dict[Ref, int] = {}
        total = 0
        profile: list[int] = []
        for i, step in enumerate(steps):
            dying = ends.get(i, set())
            for ref in self.results[i]:
                if self.roots(ref) != {ref}:
                    continue
                live[ref] = self.made[ref][1]
                total += live[ref]
                for old in self.overwritten(ref, step):
                    if old in dying and live.get(old) == live[ref]:
                        total -= live.pop(old)
                        break
                if ref not in last:
                    dying = dying | {ref}
            profile.append(total + self.inside(step))
            total -= sum(live.pop(ref, 0) for ref in dying)
        casts = cast_stacks(self.program, steps, self.axes)
        for start, stop, size in casts if self.heap.casts_stacks else ():
            for i in range(start, stop + 1):
                profile[i] += size
        return [*profile, 0]

    def makes(self, step: Step | HostStep) -> Iterator[tuple[Ref, int]]:
        """What a step makes, and its bytes in the device's memory."""
        if isinstance(step, Transfer):
            size = 0 if step.memory == HOST else self.size(step.result, step.sharding)
            yield step.result, size
        elif isinstance(step, Reshard):
            size = moved_bytes(self.program, step, self.axes)
            yield step.result, size * (1 + self.is_padded(step))
        elif isinstance(step, BlockLoop):
            for ref, old in zip(step.made, step.into, strict=True):
                yield ref, self.size(ref, step.sharding) if old is None else 0
        else:
            node = self.program.nodes[step.node]
            narrow = narrow_dtypes(node, step)
            made = zip(node.outputs, step.result_shardings, strict=True)
            for j, (value, sharding) in enumerate(made):
                size, aval = self.size(Ref(value), sharding), self.program.avals[value]
                if j in narrow:
                    size = bytes_in(size, aval, narrow[j])
                size = -(-size // self.signs_in_byte(step))
                yield Ref(value), size
            yield from exported(self.program.nodes[step.node], step, self.axes)

    def is_padded(self, step: Reshard) -> bool:
        """Whether what a gather makes is padded to tiles, to twice its bytes: a device
        has less than a tile along one of the last dimensions, and all are gathered."""
        shape = self.program.avals[step.source.value].shape
        ends = (local_shape(shape, step.path[i], self.axes)[-2:] for i in (0, -1))
        return self.heap.pads_gathers and any(
            part < min(TPU_TILE[0], made) for part, made in zip(*ends, strict=True)
        )

    def node(self, step: Apply) -> Node:
        return self.program.nodes[step.node]

    def signs_in_byte(self, step: Apply) -> int:
        """How many results of a comparison are kept in a byte; 1 for other steps."""
        node = self.node(step)
        if not (self.heap.packs_masks and fusion.tells_signs(node)):
            return 1
        shape = self.program.avals[node.outputs[0]].shape
        return signs_in_byte(local_shape(shape, step.result_shardings[0], self.axes))

    def size(self, ref: Ref, sharding: Sharding) -> int:
        return local_bytes(self.program.avals[ref.value], sharding, self.axes)

    def roots(self, ref: Ref) -> frozenset[Ref]:
        """The versions whose memory a version needs: its own, or that of what it is
        made of where it is a view or fused into all that reads it."""
        if ref not in self.known:
            step = self.made[ref][0] if ref in self.made else None
            given = None if step is None else self.made_of(ref, step)
            if given is None:
                self.known[ref] = frozenset([ref])
            else:
                each = (self.roots(r) for r in given if r is not None)
                self.known[ref] = frozenset[Ref]().union(*each)
        return self.known[ref]

    def made_of(self, ref: Ref, step: Step | HostStep) -> Sequence[Ref | None] | None:
        """What a version without memory of its own is made of; None if it has some."""
        if isinstance(step, Reshard) and len(step.path) == 1:
            return [step.source]
        if isinstance(step, Reshard):
            fused = step.is_local and self.is_fused(ref)
            return [step.source] if fused else None
        if not isinstance(step, Apply) or step.exports:
            return None
        node = self.program.nodes[step.node]
        if self.signs_in_byte(step) > 1:
            return None
        if node.passes_through:
            return [step.operands[node.outputs.index(ref.value)]]
        fuses = self.is_added(ref) or ref in self.body.duplicated
        fuses = fuses or (
            self.is_pointwise(node) and not self.scatters(step) and self.is_fused(ref)
        )
        if fusion.is_view(self.program, node) or (fuses and ref not in self.out):
            return step.operands
        if fusion.fills(self.program, node) and self.is_filled_inside(ref):
            return step.operands
        return None

    def is_pointwise(self, node: Node) -> bool:
        return fusion.is_pointwise(node) or (
            self.heap.compares and fusion.compares(node)
        )

    def is_filled_inside(self, ref: Ref) -> bool:
        """Whether an array of one number is made in each iteration of the loops that
        it is a constant of, or where it is read."""
        return ref not in self.out and all(
            isinstance(step, Apply)
            and (
                fusion.fuses(self.node(step), at)
                or any(
                    at in region.operands[: region.constants.stop]
                    for region in self.node(step).regions[-1:]
                    if self.node(step).kind == "scan"
                )
            )
            for step, at in self.readers.get(ref, ())
        )

    def is_fused(self, ref: Ref) -> bool:
        """Whether all that reads a version makes it inside of it."""
        return ref not in self.out and all(
            fusion.makes_inside(self.program, step, at) and not self.scatters(step)
            for step, at in self.readers.get(ref, ())
        )

    def is_added(self, ref: Ref) -> bool:
        """Whether a version is a scatter into zeros that one addition reads: it is
        added where the other term is."""
        step = self.made[ref][0] if ref in self.made else None
        if not isinstance(step, Apply) or self.is_pointwise(self.node(step)):
            return False
        readers = [step for step, _ in self.readers.get(ref, ())]
        return (
            fusion.adds_to_zeros(self.node(step))
            and len(readers) == 1
            and isinstance(readers[0], Apply)
            and fusion.adds(self.program.nodes[readers[0].node])
        )

    def scatters(self, step: Step | HostStep) -> bool:
        """Whether it is an addition that is made as a scatter."""
        return (
            isinstance(step, Apply)
            and fusion.adds(self.program.nodes[step.node])
            and any(ref is not None and self.is_added(ref) for ref in step.operands)
        )

    def overwritten(self, ref: Ref, step: Step | HostStep) -> Iterator[Ref]:
        """Versions whose place a version may take, if they are read for the last
        time."""
        if not isinstance(step, Apply):
            return
        node = self.program.nodes[step.node]
        at: Sequence[int] = ()
        if node.is_loop:
            made = node.outputs.index(ref.value) if ref.value in node.outputs else -1
            body = node.regions[-1]
            at = [body.operands[i] for j, i in body.loops if body.results[j] == made]
        elif fusion.writes_into(node):
            at = [0]
        elif fusion.is_pointwise(node):
            each = enumerate(step.operands)
            at = [i for i, operand in each if operand and not self.is_added(operand)]
        for i in at:
            operand = step.operands[i]
            if operand is not None:
                yield from self.roots(operand)

    def is_counted_outside(self, ref: Ref) -> bool:
        """Whether a result of the node whose body this is takes no more than what it
        does there, as it is written in place: what a loop in a call makes, and what an
        iteration writes into what it carries."""
        before, step = self.results_of[ref], self.made.get(ref, (None, 0))[0]
        if not isinstance(step, Apply):
            return False
        if not (step.bodies or fusion.writes_into(self.node(step))):
            return False
        return before is None or before in self.overwritten(ref, step)

    def inside(self, step: Step | HostStep) -> int:
        """What is live in the bodies of a step, or in an iteration of a loop over
        blocks."""
        if isinstance(step, BlockLoop):
            refs = {s.result for s in step.steps if isinstance(s, Transfer)}
            sizes = (self.size(r, step.sharding) for r in {*refs, *step.made})
            return sum(sizes) // step.blocks
        if not isinstance(step, Apply):
            return 0
        if self.heap.inlines and fusion.is_pointwise(self.node(step)):
            return 0
        if step.node not in self.within:
            self.within[step.node] = self.inside_bodies(step)
        return self.within[step.node]

    def inside_bodies(self, step: Apply) -> int:
        node = self.program.nodes[step.node]
        bodies = zip(node.bodies, step.bodies, node.regions, strict=True)
        each = (
            max(Liveness(p, body, self.axes, self.heap, results_of=of).profile())
            for p, body, region in bodies
            for of in [results_of(node, p, body, region)]
        )
        waiting = delayed_sums(node, step, self.axes) if self.heap.delays_sums else 0
        program = node.bodies[-1] if node.bodies else self.program
        carried = (
            (ahead.lead + ahead.handed)
            * version_bytes(program, ahead.part, ref, self.axes)
            for ahead in step.ahead
            for ref in ahead.part.exports
        )
        return max(each, default=0) + waiting + sum(carried)
