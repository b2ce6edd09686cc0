"""How much a device's memory a step takes, by its plan.

In: a program and its plan. Out: bytes: what a compiler fuses into what reads it, views,
and what it writes in place of something else take none. An estimate: the compiler's own
schedule and its buffers are not known to it.
"""

import math
from collections.abc import Iterator
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
from shardfn._core.program import Node, Program, aval_of
from shardfn._core.sharding import Axes, Sharding, local_shape, stored_shape
from shardfn._core.sizes import itemsize


def peak_bytes(program: Program, body: BodyPlan, axes: Axes) -> int:
    """Bytes that one device takes for a whole step: arguments, and the most of what
    lives at once besides.

    Args:
      program: the step.
      body: its plan, with the copies between the memories if it has any.
      axes: the mesh axes.

    Returns:
      The bytes.
    """
    arguments = sum(
        local_bytes(program, value, sharding, axes)
        for i, (value, sharding) in enumerate(
            zip(program.inputs, body.inputs, strict=True)
        )
        if i not in body.on_host
    )
    return arguments + _Liveness(program, body, axes, is_step=True).most()


@dataclass(slots=True)
class _Liveness:
    """The values of one body.

    Attributes:
      program: the program.
      body: its plan.
      axes: the mesh axes.
      is_step: whether its results are written over its arguments where it can be.
      made: per version, the step that makes it and its bytes.
      readers: per version, the steps that read it.
      known: see `roots`.
    """

    program: Program
    body: BodyPlan
    axes: Axes
    is_step: bool = False
    made: dict[Ref, tuple[Step | HostStep, int]] = field(default_factory=dict)
    readers: dict[Ref, list[Step | HostStep]] = field(default_factory=dict)
    known: dict[Ref, frozenset[Ref]] = field(default_factory=dict)

    def most(self) -> int:
        """The most bytes of what the body makes that live at once."""
        steps, outputs = self.body.run
        out = {ref for ref in (*outputs, *self.body.exports) if ref is not None}
        for step in steps:
            self.made.update((ref, (step, size)) for ref, size in self.makes(step))
            for ref in reads(step):
                self.readers.setdefault(ref, []).append(step)
        if self.is_step:  # new state is written over the old one
            for ref in outputs[: len(self.program.inputs)]:
                if ref in self.made:
                    self.made[ref] = self.made[ref][0], 0
        last: dict[Ref, int] = {}
        for i, step in enumerate(steps):
            last.update((r, i) for read in reads(step) for r in self.roots(read, out))
        last.update((r, len(steps)) for ref in out for r in self.roots(ref, out))
        live = most = 0
        ends: dict[int, list[int]] = {}
        for i, step in enumerate(steps):
            dying = ends.pop(i, [])
            inside = self.inside(step)
            for ref, size in self.makes(step):
                if self.roots(ref, out) != {ref}:
                    continue
                size = self.made[ref][1]
                if size in dying and self.is_in_place(step):
                    dying.remove(size)
                    live -= size
                live += size
                ends.setdefault(last.get(ref, i), []).append(size)
            most = max(most, live + inside)
            live -= sum(dying) + sum(ends.pop(i, []))
        return most

    def makes(self, step: Step | HostStep) -> Iterator[tuple[Ref, int]]:
        """What a step makes, and its bytes in the device's memory."""
        if isinstance(step, Transfer):
            size = 0 if step.memory == HOST else self.size(step.result, step.sharding)
            yield step.result, size
        elif isinstance(step, Reshard):
            yield step.result, self.size(step.result, step.path[-1])
        elif isinstance(step, BlockLoop):
            for ref, old in zip(step.made, step.into, strict=True):
                yield ref, self.size(ref, step.sharding) if old is None else 0
        else:
            outputs = self.program.nodes[step.node].outputs
            for value, sharding in zip(outputs, step.result_shardings, strict=True):
                yield Ref(value), self.size(Ref(value), sharding)
            yield from ((ref, 0) for ref in step.exports)

    def size(self, ref: Ref, sharding: Sharding) -> int:
        return local_bytes(self.program, ref.value, sharding, self.axes)

    def roots(self, ref: Ref, out: set[Ref]) -> frozenset[Ref]:
        """The versions whose memory a version needs: its own, or that of what it is
        made of where it is a view or fused into all that reads it."""
        if ref not in self.known:
            found = frozenset([ref])
            step = self.made[ref][0] if ref in self.made else None
            if isinstance(step, Apply) and not step.exports:
                node = self.program.nodes[step.node]
                if node.passes_through:
                    at = node.outputs.index(ref.value)
                    operand = step.operands[at]
                    found = frozenset() if operand is None else self.roots(operand, out)
                elif self.is_view(node) or self.is_fused(ref, node, out):
                    given = (r for r in step.operands if r is not None)
                    found = frozenset[Ref]().union(*(self.roots(r, out) for r in given))
            self.known[ref] = found
        return self.known[ref]

    def is_view(self, node: Node) -> bool:
        """Whether a node's result has the elements of its only operand."""
        if node.kind != "op" or node.rule is None or len(node.inputs) != 1:
            return False
        given, made = (
            aval_of(self.program, x) for x in (node.inputs[0], node.outputs[0])
        )
        alike = given.dtype == made.dtype and given.size == made.size
        return alike and bool(node.rule.linear)

    def is_fused(self, ref: Ref, node: Node, out: set[Ref]) -> bool:
        """Whether a version is never written: it is made element by element, and all
        that reads it is fused with it."""
        if ref in out or node.kind != "op" or not _is_pointwise(node):
            return False
        return all(
            isinstance(step, Apply) and _fuses(self.program.nodes[step.node])
            for step in self.readers.get(ref, ())
        )

    def is_in_place(self, step: Step | HostStep) -> bool:
        """Whether what a step makes may take the place of what it reads last."""
        if not isinstance(step, Apply):
            return False
        node = self.program.nodes[step.node]
        return node.is_loop or (node.kind == "op" and _is_pointwise(node))

    def inside(self, step: Step | HostStep) -> int:
        """What is live in the bodies of a step, or in an iteration of a loop over
        blocks."""
        if isinstance(step, BlockLoop):
            refs = {s.result for s in step.steps if isinstance(s, Transfer)}
            sizes = (self.size(r, step.sharding) for r in {*refs, *step.made})
            return sum(sizes) // step.blocks
        if not isinstance(step, Apply):
            return 0
        bodies = zip(self.program.nodes[step.node].bodies, step.bodies, strict=True)
        each = (_Liveness(p, body, self.axes).most() for p, body in bodies)
        return max(each, default=0)


def _is_pointwise(node: Node) -> bool:
    """Whether each element of a result is made of one of each operand."""
    rule = node.rule
    if rule is None or rule.reduce or rule.shifts or node.eqn.effects:
        return False
    return rule.flat or len(node.inputs) == 1


def _fuses(node: Node) -> bool:
    """Whether a compiler makes an operation's operands inside of it."""
    rule = node.rule
    return (
        node.kind == "op" and rule is not None and (rule.flat or len(node.inputs) == 1)
    )


def local_bytes(program: Program, value: int, sharding: Sharding, axes: Axes) -> int:
    """Bytes of a value on one device, padding included."""
    aval = program.avals[value]
    shape = stored_shape(tuple(getattr(aval, "shape", ())), sharding, axes)
    return math.prod(local_shape(shape, sharding, axes)) * itemsize(aval)
