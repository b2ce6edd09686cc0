"""Work that every device repeats, because nothing in it is split.

In: a program and its plan. Out: the FLOPs of one device's step, and the part of them
that is the same on all, with the source line that most of that is at.
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction

from shardfn._core.decomposition_flops import decomposition_flops
from shardfn._core.equation_flops import flops_of
from shardfn._core.errors import where
from shardfn._core.plan import Apply, BodyPlan
from shardfn._core.program import Node, Program
from shardfn._core.sharding import Axes, Split


@dataclass(frozen=True, slots=True)
class Work:
    """FLOPs of matrix products, convolutions and decompositions on one device; a while
    loop counts as one iteration.

    Attributes:
      flops: all of them.
      replicated: those that are the same on every device.
      place: the user's source line that most of these are at, or "".
    """

    flops: int = 0
    replicated: int = 0
    place: str = field(default="", compare=False)

    @property
    def share(self) -> float:
        """The part of a device's FLOPs that is the same on every device."""
        return self.replicated / self.flops if self.flops else 0.0

    def __str__(self) -> str:
        return (
            f"{self.share:.0%} of a device's FLOPs are the same on every device, most "
            f"of them at {self.place}"
        )


def work_of(program: Program, body: BodyPlan, axes: Axes) -> Work:
    """Counts the work of a planned step on one device."""
    total, replicated = Counter[str](), Counter[str]()
    if axes.devices > 1:
        _count(program, body, axes, 1, 1, total, replicated)
    place = max(replicated, key=lambda p: replicated[p], default="")
    return Work(total.total(), replicated.total(), place)


def _count(
    program: Program,
    body: BodyPlan,
    axes: Axes,
    times: int,
    apart: int,
    total: Counter[str],
    replicated: Counter[str],
) -> None:
    """Adds up by source line what `body` does `times` times; devices run it on other
    rows if they are `apart`."""
    for step in body.steps:
        if not isinstance(step, Apply):
            continue
        node = program.nodes[step.node]
        own = _flops(node) * times if node.kind == "op" else 0
        if own:
            place = where(node.eqn)
            parts = apart * math.prod(axes.sizes[axis] for _, axis in step.parts)
            total[place] += math.ceil(own * _padded(node, step, axes) / parts)
            if parts == 1 and not _takes_parts(step, axes):
                replicated[place] += own
        if not step.bodies:
            continue
        shared = _rows_apart(node, step, axes)
        rows, runs = apart * shared, times * (step.times or 1) // shared
        for inner, plan in zip(node.bodies, step.bodies, strict=True):
            _count(inner, plan, axes, runs, rows, total, replicated)


def _flops(node: Node) -> int:
    """Of an operation on whole operands."""
    return flops_of(node.eqn).total() + decomposition_flops(node.eqn)


def _padded(node: Node, step: Apply, axes: Axes) -> Fraction:
    """How much more the first device has than a part of as many as there are devices,
    where these do not divide what they split."""
    counts: dict[str, int] = {}
    for factor, axis in step.parts:
        counts[factor] = counts.get(factor, 1) * axes.sizes[axis]
    if not counts:
        return Fraction(1)
    return math.prod(
        (
            Fraction(math.ceil(Fraction(size, counts[factor])) * counts[factor], size)
            for factor, size in (node.rule.sizes if node.rule is not None else ())
            if factor in counts and size
        ),
        start=Fraction(1),
    )


def _takes_parts(step: Apply, axes: Axes) -> bool:
    """Whether an operand differs from device to device."""
    return any(
        state is not None and size > 1
        for sharding in step.operand_shardings
        for state, size in zip(sharding, axes.sizes, strict=True)
    )


def _rows_apart(node: Node, step: Apply, axes: Axes) -> int:
    """How many devices share the iterations of a scan: those that split the dimension
    it goes along."""
    split = {
        axis
        for sharding in node.sliced(step.operand_shardings)
        for axis, state in enumerate(sharding)
        if isinstance(state, Split) and state.dim == 0
    }
    return math.prod(axes.sizes[axis] for axis in split)
