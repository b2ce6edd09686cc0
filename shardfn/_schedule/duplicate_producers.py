"""Lets each matrix product make a large operand itself, where it can as it reads it.

In: a plan. Out: the plan, which names the values that pointwise operations make and
several products read, such as the gradient of attention's scores, which those of the
queries and of the keys are made of. Each product is given its own. XLA for TPUs makes
an operand that one product reads inside of it, tile by tile, and writes to memory what
several read.
"""

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from jax import lax

from shardfn._core.limits import (
    DUPLICATED_BYTES,
    DUPLICATED_COLUMNS,
    DUPLICATED_READS,
)
from shardfn._core.plan import Apply, BodyPlan, HostStep, Ref, Reshard, Step, reads
from shardfn._core.program import Node, Program
from shardfn._core.sharding import Axes, Sharding
from shardfn._core.sizes import elements, local_bytes, nbytes
from shardfn._schedule.bodies import inside
from shardfn._schedule.fusion import is_pointwise, is_view, makes_inside


def duplicate_producers(program: Program, body: BodyPlan, axes: Axes) -> BodyPlan:
    """Names the values of a plan that each product which reads them makes itself.

    Those of `limits.DUPLICATED_BYTES` or more, for products that read them once, as
    they multiply them with `limits.DUPLICATED_COLUMNS` at most, where this reads no
    more than to write them first (`limits.DUPLICATED_READS`).

    Args:
      program: the program.
      body: its plan.
      axes: the mesh axes.

    Returns:
      The plan; the same where the compiler makes no operand inside of a product.
    """
    if not axes.fuses_producers:
        return body
    body = inside(program, body, lambda p, b: duplicate_producers(p, b, axes))
    found = Producers(program, body, axes)
    return replace(body, duplicated=tuple(filter(found.should_duplicate, found.made)))


@dataclass(slots=True)
class Producers:
    """What makes the values of one body, and what reads them.

    Attributes:
      program: the program.
      body: its plan.
      axes: the mesh axes.
      made: the step that makes a version, by an operation of the program.
      readers: the steps that read a version, as often as they do.
      shardings: of each version that is known.
    """

    program: Program
    body: BodyPlan
    axes: Axes
    made: dict[Ref, Apply] = field(default_factory=dict)
    readers: dict[Ref, list[Step | HostStep]] = field(default_factory=dict)
    shardings: dict[Ref, Sharding] = field(default_factory=dict)

    def __post_init__(self) -> None:
        inputs = map(Ref, self.program.inputs)
        self.shardings.update(zip(inputs, self.body.inputs, strict=True))
        for step in self.body.run[0]:
            for ref in reads(step):
                self.readers.setdefault(ref, []).append(step)
            if isinstance(step, Reshard):
                self.shardings[step.result] = step.path[-1]
            elif isinstance(step, Apply):
                refs = [*map(Ref, self.program.nodes[step.node].outputs)]
                self.made.update(dict.fromkeys(refs, step))
                self.shardings.update(zip(refs, step.result_shardings, strict=True))

    def should_duplicate(self, value: Ref) -> bool:
        """Whether each of the products that read a value had better make it itself."""
        readers, size = self.readers.get(value, []), self.size(value)
        if (
            size < DUPLICATED_BYTES
            or len(readers) < 2
            or value in self.body.leaving
            or not self.is_remade(value, value)
            or not all(self.reads_once(step, value) for step in readers)
        ):
            return False
        nodes, given = self.chain(value)
        if all(is_view(self.program, self.program.nodes[at]) for at in nodes):
            return False
        return sum(map(self.size, given)) <= DUPLICATED_READS * size

    def chain(self, value: Ref) -> tuple[Set[int], Set[Ref]]:
        """The nodes of the pointwise operations that make a value, of what has as many
        elements and is in memory for nothing else, and the versions they begin with."""
        nodes, given, todo = set[int](), set[Ref](), [value]
        while todo:
            step = self.made[todo.pop()]
            if step.node in nodes:
                continue
            nodes.add(step.node)
            for ref in filter(None, step.operands):
                if self.is_remade(ref, value) and self.is_fused(ref):
                    todo.append(ref)
                else:
                    given.add(ref)
        return nodes, given

    def is_fused(self, ref: Ref) -> bool:
        """Whether all that reads a version makes it inside of it."""
        return ref not in self.body.leaving and all(
            makes_inside(self.program, step, _place(step, ref))
            for step in self.readers[ref]
        )

    def is_remade(self, ref: Ref, value: Ref) -> bool:
        """Whether a pointwise operation makes a version, like a value that is made of
        it."""
        step = self.made.get(ref)
        if step is None:
            return False
        node, avals = self.program.nodes[step.node], self.program.avals
        alike = elements(avals[ref.value]) == elements(avals[value.value])
        return alike and node.kind == "op" and is_pointwise(node)

    def reads_once(self, step: Step | HostStep, value: Ref) -> bool:
        """Whether a step is a product that reads each element of a value once: it has
        no more columns than are computed at a time."""
        if not isinstance(step, Apply) or step.operands.count(value) != 1:
            return False
        node = self.program.nodes[step.node]
        if node.kind != "op" or node.eqn.primitive is not lax.dot_general_p:
            return False
        return _columns(node, step.operands.index(value)) <= DUPLICATED_COLUMNS

    def size(self, ref: Ref) -> int:
        """Bytes of a version on a device; of the whole value if that is not known."""
        aval, sharding = self.program.avals[ref.value], self.shardings.get(ref)
        return (
            nbytes(aval) if sharding is None else local_bytes(aval, sharding, self.axes)
        )


def _place(step: Step | HostStep, ref: Ref) -> int:
    """As which operand a step reads a version; -1 for none."""
    operands = step.operands if isinstance(step, Apply) else ()
    return operands.index(ref) if ref in operands else -1


def _columns(node: Node, operand: int) -> int:
    """With how many numbers a product multiplies each element of an operand."""
    contracted, batch = node.eqn.params["dimension_numbers"]
    other = 1 - operand
    shape: Sequence[Any] = node.eqn.invars[other].aval.shape  # pyright: ignore
    used = {*contracted[other], *batch[other]}
    return math.prod(n for d, n in enumerate(shape) if d not in used)
