"""How leaves that live in the host's memory come to the device and go back.

In: a plan that takes every leaf for one in the device's memory. Out: the same with
copies between the memories: of whole leaves where an operation needs a whole one, else
block by block, where only pointwise operations read and write it, as in an optimizer.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from shardfn._core.limits import HOST_BLOCK_BYTES
from shardfn._core.memories import DEVICE, HOST
from shardfn._core.phases import UPDATE, Pass
from shardfn._core.plan import (
    Apply,
    BlockLoop,
    BodyPlan,
    HostSchedule,
    HostStep,
    Ref,
    Reshard,
    Step,
    Transfer,
    reads,
)
from shardfn._core.program import Program
from shardfn._core.sharding import Axes, Sharding, local_shape, stored_shape
from shardfn._core.step_order import made_by
from shardfn._core.tile_limits import TPU_TILE
from shardfn._schedule.host_clusters import Cluster, clusters_of
from shardfn._schedule.host_order import Unit, in_order
from shardfn._schedule.host_scans import scanned
from shardfn._schedule.versions import reading


def host_transfers(program: Program, body: BodyPlan, axes: Axes) -> BodyPlan:
    """Puts the copies between the memories into a plan of a whole step.

    Args:
      program: the step.
      body: its plan, scheduled.
      axes: the mesh axes.

    Returns:
      The plan; the same where no leaf lives in the host's memory.
    """
    if not (body.on_host or body.to_host):
        return body
    return _Placement(program, body, axes, body.inputs).placed()


@dataclass(slots=True)
class _Placement:
    """A plan while copies are put into it.

    Attributes:
      program: the step.
      body: its plan.
      axes: the mesh axes.
      inputs: the shardings of its arguments.
      in_blocks: whether clusters of pointwise operations may go through leaves in
        blocks: not in the body of a scan, which takes a slice each time.
      host: the versions that arrive in the host's memory, and their shardings.
      goals: those that leave there, the leaf that each replaces, and their shardings.
      copies: per version and memory, the copy that it has there.
      maker: per version, the index of the step that makes it.
      readers: per version, the indices of the steps that read it.
    """

    program: Program
    body: BodyPlan
    axes: Axes
    inputs: tuple[Sharding, ...]
    in_blocks: bool = True
    host: dict[Ref, Sharding] = field(default_factory=dict)
    goals: dict[Ref, tuple[Ref, Sharding]] = field(default_factory=dict)
    copies: dict[tuple[Ref, str], Ref] = field(default_factory=dict)
    maker: dict[Ref, int] = field(default_factory=dict)
    readers: dict[Ref, list[int]] = field(default_factory=dict)
    versions: Iterator[int] = field(init=False)

    def __post_init__(self) -> None:
        program, body = self.program, self.body
        for i in sorted(body.on_host):
            self.host[Ref(program.inputs[i])] = self.inputs[i]
        for j in sorted(body.to_host):
            ref = body.outputs[j]
            if ref is not None and ref not in self.host:
                old = Ref(program.inputs[j])
                self.goals.setdefault(ref, (old, body.output_shardings[j]))
        for index, step in enumerate(body.steps):
            self.maker.update((ref, index) for ref in made_by(program, step))
            for ref in reads(step):
                self.readers.setdefault(ref, []).append(index)
        known = (*self.maker, *body.imports)
        top = max((ref.version for ref in known), default=0)
        self.versions = itertools.count(top + 1)

    def placed(self) -> BodyPlan:
        """The plan with the copies."""
        body = self.body
        host = self.host if self.in_blocks else ()
        clusters = clusters_of(self.program, body, host)
        last = {cluster.ops[-1]: cluster for cluster in clusters}
        inside = {index for cluster in clusters for index in cluster.ops}
        units: list[Unit] = []
        for index, step in enumerate(body.steps):
            if index in last:
                units.append(self.of_cluster(last[index]))
            elif index not in inside:
                unit = self.of_step(step)
                first = step.together if isinstance(step, Reshard) else None
                if first is not None and first not in made_by(self.program, step):
                    unit = units.pop().then(unit)  # one with the moves before it
                units.append(unit)
        outputs = tuple(self.output(j, units) for j in range(len(body.outputs)))
        known = {*map(Ref, self.program.inputs), *body.imports}
        known |= {Ref(value) for value, _ in self.program.constants}
        steps = tuple(in_order(units, known))
        return replace(body, host=HostSchedule(steps, outputs))

    def output(self, j: int, units: list[Unit]) -> Ref | None:
        """What output `j` hands out: a copy, if it is in the other memory."""
        ref, memory = self.body.outputs[j], HOST if j in self.body.to_host else DEVICE
        if ref is None or (ref in self.host) == (memory == HOST):
            return ref
        if (ref, memory) not in self.copies:
            units.append(self.unit([self.copy(ref, memory)]))
        return self.copies[ref, memory]

    def of_step(self, step: Step) -> Unit:
        """A step that needs whole leaves, behind the copies that it is the first to
        need. A scan needs slices of what it goes through."""
        sliced = scanned(self.program, step, self.host)
        copies: list[Step | HostStep] = [
            self.copy(ref, DEVICE)
            for ref in dict.fromkeys(reads(step))
            if ref in self.host.keys() - sliced and (ref, DEVICE) not in self.copies
        ]
        whole = {ref: copy for (ref, to), copy in self.copies.items() if to == DEVICE}
        here = reading(step, lambda r: r if r in sliced else whole.get(r, r))
        if isinstance(here, Apply) and self.program.nodes[here.node].kind == "scan":
            here = self.in_slices(here, sliced) if sliced else here
        return self.unit([*copies, here])

    def in_slices(self, step: Apply, sliced: frozenset[Ref]) -> Apply:
        """A scan whose body copies the slices of leaves that it gets."""
        node, (body,) = self.program.nodes[step.node], step.bodies
        (region,), (inner,) = node.regions, node.bodies
        of = region.entering(step.operands)
        given = frozenset(a for a in region.slices if of[a] in sliced)

        def placed(plan: BodyPlan) -> BodyPlan:
            plan = replace(plan, on_host=given)
            return _Placement(inner, plan, self.axes, body.inputs, False).placed()

        ahead = tuple(replace(each, part=placed(each.part)) for each in step.ahead)
        return replace(step, bodies=(placed(body),), ahead=ahead)

    def unit(self, steps: Sequence[Step | HostStep]) -> Unit:
        makes = frozenset(r for s in steps for r in made_by(self.program, s))
        read = frozenset(r for s in steps for r in reads(s))
        return Unit(tuple(steps), read - makes, makes)

    def copy(self, ref: Ref, memory: str) -> Transfer:
        """The copy of a whole version, to be used by all that need it."""
        step = self.transfer(ref, memory)
        self.copies[ref, memory] = step.result
        return step

    def transfer(self, ref: Ref, memory: str, after: Ref | None = None) -> Transfer:
        aval = self.program.avals[ref.value]
        return Transfer(
            source=ref,
            result=Ref(ref.value, next(self.versions)),
            memory=memory,
            shape=tuple(aval.shape),
            sharding=self.host[ref] if ref in self.host else self.goals[ref][1],
            dtype=str(aval.dtype),
            itemsize=aval.dtype.itemsize,
            during=self.during(ref, memory),
            leaf=self.program.leaf(
                (self.goals[ref][0] if ref in self.goals else ref).value
            ),
            after=after,
        )

    def during(self, ref: Ref, memory: str) -> Pass:
        """In which pass a version is copied: that of its first reader, or of what made
        it."""
        index = (
            self.maker.get(ref) if memory == HOST else self.readers.get(ref, [None])[0]
        )
        step = None if index is None else self.body.steps[index]
        if isinstance(step, Reshard):
            return step.during
        if isinstance(step, Apply):
            return self.program.nodes[step.node].during
        return Pass(UPDATE)

    # Clusters

    def of_cluster(self, cluster: Cluster) -> Unit:
        """A cluster: a loop over blocks, or its steps on whole leaves."""
        shape, sharding = cluster.form
        local = local_shape(shape, sharding, self.axes)
        dim = next((d for d, n in enumerate(local) if n > 1), 0)
        if stored_shape(shape, sharding, self.axes) != shape:
            return self.unit(self.steps_of(cluster, self.made_last(cluster)))
        blocks = self.blocks_of(cluster, local, dim)
        if blocks == 1:
            return self.unit(self.steps_of(cluster, self.made_last(cluster)))
        steps = self.steps_of(cluster, None)
        made = dict(self.leaving(cluster))
        outside = (*cluster.read, *(ref for ref in made.values() if ref is not None))
        loop = BlockLoop(
            steps=tuple(steps),
            shape=tuple(shape),
            sharding=sharding,
            dim=dim,
            blocks=blocks,
            sliced=tuple(r for r in cluster.read if self.is_large(r, cluster)),
            made=tuple(made),
            into=tuple(made.values()),
            reads=tuple(dict.fromkeys(outside)),
        )
        return self.unit([loop])

    def blocks_of(self, cluster: Cluster, local: Sequence[int], dim: int) -> int:
        """Into how many blocks a device's part is cut: the least number of those that
        divide its rows into whole tiles of a TPU, whose compiler ends on others, that
        leaves at most so many bytes in a block of the widest leaf."""
        widths = {
            self.program.avals[ref.value].dtype.itemsize
            for ref in (*cluster.read, *cluster.made)
            if self.is_large(ref, cluster)
        }
        least = -(-math.prod(local) * max(widths) // HOST_BLOCK_BYTES)
        rows, minor = local[dim], len(local) - dim
        tile = TPU_TILE[-minor] * 4 // min(4, *widths) if minor <= 2 else 1
        able = [
            k for k in range(1, rows + 1) if rows % k == 0 and rows // k % tile == 0
        ]
        return next((k for k in able if k >= least), max(able, default=1))

    def steps_of(self, cluster: Cluster, after: Ref | None) -> list[Apply | Transfer]:
        """The steps of a cluster, between the copies that it needs and those that it
        makes."""
        last = self.body.steps[cluster.ops[-1]]
        assert isinstance(last, Apply)
        during = self.program.nodes[last.node].during
        steps: list[Apply | Transfer] = [
            replace(self.transfer(ref, DEVICE, after), during=during)
            for ref in cluster.read
            if ref in self.host
        ]
        here = {
            step.source: step.result for step in steps if isinstance(step, Transfer)
        }
        for index in cluster.ops:
            op = reading(self.body.steps[index], lambda ref: here.get(ref, ref))
            assert isinstance(op, Apply)
            steps.append(op)
        made = (
            ref
            for i in cluster.ops
            for ref in made_by(self.program, self.body.steps[i])
        )
        return [*steps, *(self.copy(ref, HOST) for ref in made if ref in self.goals)]

    def leaving(self, cluster: Cluster) -> Iterator[tuple[Ref, Ref | None]]:
        """What leaves a cluster, and in whose place it is written: new leaves over the
        old ones, others over what nothing reads later, leaves of the state first. What
        has a place of its own is as large as a leaf, and the old one is there, too."""
        inputs, ops = set(map(Ref, self.program.inputs)), set(cluster.ops)
        avals = self.program.avals
        replaces = {
            ref: Ref(self.program.inputs[j])
            for j, ref in enumerate(self.body.outputs[: len(inputs)])
            if ref is not None and j not in self.body.to_host
        }
        outputs = {
            ref for j, ref in enumerate(self.body.outputs) if j not in self.body.to_host
        }
        outputs |= {ref for ref in self.body.outputs if ref not in self.goals}

        def is_read(ref: Ref) -> bool:
            """Whether something outside of the cluster reads a version."""
            return ref in outputs or not ops.issuperset(self.readers.get(ref, ()))

        def is_read_later(ref: Ref) -> bool:
            later = (i > cluster.ops[-1] for i in self.readers.get(ref, ()))
            return ref in outputs or any(later)

        free = [r for r in cluster.read if self.is_large(r, cluster)]
        free = [r for r in free if r not in self.host and not is_read_later(r)]
        free.sort(key=lambda ref: ref not in inputs)
        for index in cluster.ops:
            for ref in made_by(self.program, self.body.steps[index]):
                if ref in self.goals:
                    yield self.copies[ref, HOST], self.goals[ref][0]
                if is_read(ref):
                    dtype = avals[ref.value].dtype
                    alike = [r for r in free if avals[r.value].dtype == dtype]
                    own = [r for r in alike if r == replaces.get(ref)]
                    place = next(iter([*own, *alike]), None)
                    free = [r for r in free if r != place]
                    yield ref, place

    def made_last(self, cluster: Cluster) -> Ref | None:
        """What a cluster waits for: of the large versions that it reads, the one made
        last."""
        large = [r for r in cluster.read if self.is_large(r, cluster)]
        large = [r for r in large if r in self.maker]
        return max(large, key=lambda ref: self.maker[ref], default=None)

    def is_large(self, ref: Ref, cluster: Cluster) -> bool:
        return self.program.avals[ref.value].shape == cluster.form[0]
