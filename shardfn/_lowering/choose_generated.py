"""Splits rows that a step makes by itself, of keys or by counting, as if they were a
batch.

In: a program and its plan, and a function that plans. Out: the program in which noise,
points or environments are split where they are made, if nothing else splits them, and
if the step then takes less time. A loss of random points and a generator's half of a
GAN have no batch: each device would work on all of these rows.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardfn._core import compat
from shardfn._core.constraint import split_rows
from shardfn._core.equation_flops import flops_of
from shardfn._core.errors import where
from shardfn._core.limits import (
    GENERATED_FLOPS,
    GENERATED_SHARE,
    GENERATED_TRIALS,
    LATENCY_BYTES,
    REPEATED_FLOPS,
)
from shardfn._core.plan import Apply, BodyPlan, Reshard
from shardfn._core.program import Node, Program, number_of
from shardfn._core.sent_bytes import Made, Sent, sent, sent_by
from shardfn._core.sharding import Axes, Sharding, Split
from shardfn._lowering.constrained_values import NodePath, with_result
from shardfn._lowering.replanning import ProgramChoice, Replanning
from shardfn.analysis._replicated import work_of

GENERATORS = frozenset(compat.primitives("random_bits", "random_split", "iota"))
"""The operations that make rows of what has none; each device can make its own."""


@dataclass(frozen=True, slots=True)
class GeneratedChoice(ProgramChoice):
    """What was found of rows that the step makes by itself.

    Attributes:
      places: the user's lines that make them, with the shape and the dimension.
      work: FLOPs of one device per step before, and after.
    """

    work: tuple[int, int] = (0, 0)

    @property
    def notes(self) -> tuple[str, ...]:
        """The plan's line about them."""
        if self.program is None:
            return ()
        before, after = self.sizes
        flops = self.work[1] / max(self.work[0], 1)
        return (
            f"rows that the step makes are split: {self.where}: "
            f"{flops:.2f} of the FLOPs (limits.GENERATED_FLOPS), {after} sent per step "
            f"instead of {before} (limits.REPEATED_FLOPS), and at least "
            f"{GENERATED_SHARE:.0%} less time of both (limits.GENERATED_SHARE)",
        )


def choose_generated(now: Replanning) -> GeneratedChoice:
    """The program with rows split that it makes by itself, if that is worth it.

    Args:
      now: the program and its plan so far.

    Returns:
      What was found.
    """
    program, made, axes, plan = now.program, now.made, now.axes, now.plan
    first = best = _Tried(program, made, axes)
    places: list[str] = []
    passed: set[NodePath] = set()
    for _ in range(GENERATED_TRIALS):
        found = _largest(*best.made, axes, passed)
        if found is None:
            break
        place, node, price = found
        least = GENERATED_FLOPS / REPEATED_FLOPS
        if price < max(least, GENERATED_SHARE * best.price):
            break
        passed.add(place)
        tried: dict[int, _Tried] = {}
        for dim in _dims(node, axes):
            split = functools.partial(split_rows, axes=axes.batch, dim=dim)
            changed = with_result(best.program, place, split)
            tried[dim] = _Tried(changed, plan(changed), axes)
        dim = min(tried, key=lambda d: tried[d].price, default=None)
        if dim is None or tried[dim].price > (1 - GENERATED_SHARE) * best.price:
            continue
        best = tried[dim]
        shape = "x".join(map(str, _shape(node)))
        places.append(f"dimension {dim} of {shape} at {where(node.eqn)}")
    if best is first:
        return GeneratedChoice()
    return GeneratedChoice(
        best.program,
        tuple(places),
        first.sent,
        best.sent,
        (first.flops, best.flops),
    )


class _Tried:
    """A program that was planned, and what it takes: found when it is asked, as most
    programs have no rows of their own.

    Attributes:
      program: the program, before any pass of planning changes it.
      made: the program and its plan.
      axes: the mesh axes.
    """

    def __init__(self, program: Program, made: Made, axes: Axes):
        self.program, self.made, self.axes = program, made, axes

    @functools.cached_property
    def sent(self) -> Sent:
        """What each device sends per step."""
        return sent(*self.made, self.axes)

    @functools.cached_property
    def flops(self) -> int:
        """What each device computes."""
        return work_of(*self.made, self.axes).flops

    @property
    def price(self) -> float:
        """Bytes, and those that could be sent while it computes."""
        return self.sent.price + self.flops / REPEATED_FLOPS


def _shape(node: Node) -> tuple[int, ...]:
    return node.eqn.outvars[0].aval.shape  # pyright: ignore


def _dims(node: Node, axes: Axes) -> Iterator[int]:
    """The dimensions of a generator's result that devices can make in blocks."""
    assert node.rule is not None
    shape, devices = _shape(node), math.prod(map(axes.size, axes.batch))
    made = node.rule.results[0]
    for dim, size in enumerate(shape):
        factor = node.rule.major(made, dim)
        if factor is None or not node.rule.is_splittable(factor):
            continue
        if not any(factor in d for dims in node.rule.operands for d in dims):
            if size and size % devices == 0:
                yield dim


def _largest(
    program: Program, body: BodyPlan, axes: Axes, passed: set[NodePath]
) -> tuple[NodePath, Node, float] | None:
    """The generator, of those not `passed`, whose whole rows take most of one device,
    and what they take: bytes, and those that could be sent meanwhile."""
    traced = _Traced(axes, passed)
    given = [int(_is_of_batch(sharding)) for sharding in body.inputs]
    traced.body(program, body, given, (), 1)
    if not traced.prices:
        return None
    most = max(traced.prices, key=lambda k: (traced.prices[k], -k))
    return *traced.found[most], traced.prices[most]


def _has_rows(step: Apply, axes: Axes) -> bool:
    """Whether an operation works on some of the rows on each device: on parts of what
    is not stored in parts."""
    return any(
        isinstance(state, Split) and not state.stored and size > 1
        for sharding in step.operand_shardings
        for state, size in zip(sharding, axes.sizes, strict=True)
    )


def _is_of_batch(sharding: Sharding) -> bool:
    """Whether an argument is given in rows: then the lowest bit of its mask is set."""
    return any(isinstance(state, Split) and not state.stored for state in sharding)


class _Traced:
    """A plan while it is traced which generators each value is made of.

    Attributes:
      axes: the mesh axes.
      passed: places of generators to leave out.
      numbers: by place, the number of a generator, from 1; that bit of a mask stands
        for it, and the lowest one for rows of the batch.
      found: by number, the generators.
      prices: by number, what one device does on what is made of its rows, whole: bytes
        of its moves, and those that could be sent while it computes.
    """

    def __init__(self, axes: Axes, passed: set[NodePath]):
        self.axes, self.passed = axes, passed
        self.numbers: dict[NodePath, int] = {}
        self.found: dict[int, tuple[NodePath, Node]] = {}
        self.prices = defaultdict[int, float](float)

    def body(
        self,
        program: Program,
        body: BodyPlan,
        inputs: Sequence[int],
        place: NodePath,
        times: int,
    ) -> list[int]:
        """Traces a body that is given values of these masks, and runs so many times; 0
        counts no work. Returns the masks of its results."""
        masks = dict(zip(program.inputs, inputs, strict=True))
        for step in body.steps:
            if isinstance(step, Reshard):
                # Where a batch is met, what is sent may as well be of that.
                mask = masks.get(step.source.value, 0)
                if times and not mask & 1:
                    size, count = sent_by(step, self.axes)
                    self.add(mask, times * (size + count * LATENCY_BYTES))
                continue
            node = program.nodes[step.node]
            at = (*place, *node.outputs[:1])
            operands = [masks.get(number_of(a), 0) for a in node.inputs]
            if node.bodies:
                results = self.flow(node, step, operands, at, times)
            else:
                mask = self.op(node, step, operands, at, times)
                results = [mask] * len(node.outputs)
            masks.update(zip(node.outputs, results, strict=True))
        return [masks.get(number_of(a), 0) for a in program.outputs]

    def flow(
        self, node: Node, step: Apply, operands: Sequence[int], at: NodePath, times: int
    ) -> list[int]:
        """The masks of the results of control flow."""
        results = [0] * len(node.outputs)
        for k, region in enumerate(node.regions):
            inner, plan = node.bodies[k], step.bodies[k]
            inputs, out = region.entering(operands), list[int]()
            for counts in (0, 1) if region.loops else (1,):
                runs = counts * times * (step.times or 1)
                out = self.body(inner, plan, inputs, (*at, k), runs)
                for j, i in region.loops:
                    inputs[i] |= out[j]
            for j, result in region.returned():
                results[result] |= out[j]
        return results

    def op(
        self, node: Node, step: Apply, operands: Sequence[int], at: NodePath, times: int
    ) -> int:
        """The mask of an operation's results."""
        mask = 0
        for operand in operands:
            mask |= operand
        if _has_rows(step, self.axes):
            return mask
        if times and (own := sum(flops_of(node.eqn).values())):
            own //= math.prod(self.axes.sizes[axis] for _, axis in step.parts)
            self.add(mask, own * times / REPEATED_FLOPS)
        if node.eqn.primitive in GENERATORS and node.rule is not None:
            if at not in self.passed and any(True for _ in _dims(node, self.axes)):
                number = self.numbers.setdefault(at, len(self.numbers) + 1)
                self.found[number] = at, node
                mask |= 1 << number
        return mask

    def add(self, mask: int, price: float) -> None:
        """Counts this for each generator of a mask."""
        for number in range(1, mask.bit_length()):
            if mask >> number & 1:
                self.prices[number] += price
