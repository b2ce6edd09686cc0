"""Updates of whole matrices, divided among devices that each own some of them.

In: a program and its plan, and a function that plans. Out: the plan in which stacks of
matrices, `[layers, m, n]`, come by an all-to-all to be split along the layers where an
update takes matrices whole, as Muon's and Shampoo's do, if that sends less. Each device
then computes its layers alone, and a second all-to-all takes the results to where the
leaves are stored.
"""

import functools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from shardfn._core.constraint import split_of_state
from shardfn._core.errors import listed, where
from shardfn._core.limits import (
    REPEATED_FLOPS,
    STATIONARY_BYTES,
    STATIONARY_LIVE,
)
from shardfn._core.phases import UPDATE
from shardfn._core.plan import BodyPlan, Reshard
from shardfn._core.program import Node, Program, number_of
from shardfn._core.sent_bytes import Made, Sent, communicating_moves, sent
from shardfn._core.sharding import Axes
from shardfn._core.shown_limits import SHOWN_LEAVES
from shardfn._core.sizes import nbytes
from shardfn._lowering.constrained_values import with_operands
from shardfn._lowering.live_bytes import live_bytes
from shardfn._lowering.replanning import ProgramChoice, Replanning, least_saved
from shardfn.analysis._replicated import work_of


@dataclass(frozen=True, slots=True)
class OwnersChoice(ProgramChoice):
    """What was found of updates that take whole matrices.

    Attributes:
      work: FLOPs of one device per step before, and after.
      lone: shapes of stacks of one matrix.
      uneven: numbers of layers that devices do not divide.
      count: devices.
    """

    work: tuple[int, int] = (0, 0)
    lone: tuple[tuple[int, ...], ...] = ()
    uneven: tuple[int, ...] = ()
    count: int = 1

    @property
    def notes(self) -> tuple[str, ...]:
        """The plan's lines about these updates."""
        lines = []
        if self.program is not None:
            before, after = self.sizes
            work = f"{self.work[1] / max(self.work[0], 1):.2f} of the FLOPs"
            lines.append(
                f"whole matrices by owners: {self.where}: "
                f"{after} sent per step, in {self.after.collectives} collectives, "
                f"instead of {before} in {self.before.collectives}, and {work}"
            )
        for layers in self.uneven:
            most = math.ceil(layers / self.count)
            lines.append(
                f"{self.count} devices do not divide {layers} layers: "
                f"{layers // most} of them own {most} each, the others what is left"
            )
        if self.lone:
            shapes = listed(["x".join(map(str, s)) for s in self.lone], SHOWN_LEAVES)
            lines.append(
                f"not by owners: {shapes}: one matrix each; a stack of layers in one "
                "leaf can be divided"
            )
        return tuple(lines)


def choose_owners(now: Replanning) -> tuple[Made, OwnersChoice]:
    """The plan with updates of whole matrices divided, if that is worth it.

    Args:
      now: the program and its plan so far.

    Returns:
      The plan, and what was found.
    """
    program, made, axes, plan = now.program, now.made, now.axes, now.plan
    count = axes.sizes[axes.stored]
    found = list(_moving(*made, axes)) if count > 1 else []
    before = sent(*made, axes) if found else Sent()
    worth = least_saved(before)
    if sum(size for _, size in found) < worth:
        return made, OwnersChoice()
    nodes = {node.outputs: node for node in program.nodes}
    stacks: dict[tuple[int, ...], list[int]] = {}
    lone: dict[tuple[int, ...], None] = {}
    for node, size in found:
        same = nodes.get(node.outputs)
        values = []
        if same is not None and _is_whole(same):
            values = _stacks(program, same)
        least = sum(nbytes(program.avals[value]) for value in values) / count
        if same is None or not values or size <= least:
            continue
        shape = program.avals[values[0]].shape
        if shape[0] == 1:
            lone[shape] = None
        else:
            stacks[same.outputs] = values
    if not stacks:
        return made, OwnersChoice(lone=tuple(lone))
    divided = _divided(program, stacks | _between(program, stacks), axes)
    tried = plan(divided)
    after = sent(*tried, axes)
    work = work_of(*made, axes).flops, work_of(*tried, axes).flops
    more = live_bytes(*tried, axes) - live_bytes(*made, axes)
    saves = before.price - after.price + (work[0] - work[1]) / REPEATED_FLOPS
    least = worth if more > 0 else STATIONARY_BYTES
    if saves < least or more > STATIONARY_LIVE:
        return made, OwnersChoice(lone=tuple(lone))
    places = tuple(dict.fromkeys(where(nodes[k].eqn) for k in stacks))
    heights = {program.avals[v].shape[0] for values in stacks.values() for v in values}
    uneven = tuple(sorted(h for h in heights if h % count))
    return tried, OwnersChoice(
        divided, places, before, after, work, tuple(lone), uneven, count
    )


def _moving(
    program: Program, body: BodyPlan, axes: Axes
) -> Iterator[tuple[Node, float]]:
    """The nodes of the update around or in which something is moved, or which take a
    matrix that every device has whole, and the bytes."""
    sizes: Counter[tuple[int, ...]] = Counter()
    nodes = {node.outputs: node for node in program.nodes}
    for step in body.steps:
        if isinstance(step, Reshard):
            cause = step.cause.node if step.cause is not None else None
            if cause is not None and nodes.get(cause.outputs) is cause:
                for _, move in communicating_moves(step, axes):
                    size = move.wire_bytes(step.part_shape, axes, step.itemsize)
                    sizes[cause.outputs] += round(size)
        elif step.bodies:
            node = program.nodes[step.node]
            for inner in zip(node.bodies, step.bodies, strict=True):
                sizes[node.outputs] += sent(*inner, axes, step.times or 1).bytes
        elif _is_whole(node := program.nodes[step.node]) and not step.parts:
            values = set(_stacks(program, node))
            sizes[node.outputs] += sum(nbytes(program.avals[v]) for v in values)
    for outputs, size in sizes.items():
        if size and nodes[outputs].during.phase == UPDATE:
            yield nodes[outputs], size


def _stacks(program: Program, node: Node) -> list[int]:
    """The operands of a node that are stacks of matrices, along the first dimension of
    which it does the same to each; none if it does not, or has no such operands."""
    sliced = node.sliced(node.inputs) if node.bodies else []
    values = [
        atom
        for atom in node.inputs
        if isinstance(atom, int) and len(getattr(program.avals[atom], "shape", ())) > 2
    ]
    heights = {program.avals[value].shape[0] for value in values}
    if len(heights) != 1 or any(value in sliced for value in values):
        return []
    if node.bodies:
        return values
    if node.rule is None:
        return []
    sides = zip(node.inputs, node.rule.operands, strict=True)
    leading = {dims[0] for atom, dims in sides if atom in values}
    leading |= {dims[0] if dims else () for dims in node.rule.results}
    if len(leading) != 1 or len(min(leading)) != 1:
        return []
    return values if node.rule.is_splittable(min(leading)[0]) else []


def _between(
    program: Program, stacks: dict[tuple[int, ...], list[int]]
) -> dict[tuple[int, ...], list[int]]:
    """The nodes that take owned matrices on to other operations on whole matrices, with
    their operands that are such stacks: the products of an iteration by hand, and what
    is added between them."""
    owned = {value for values in stacks.values() for value in values}
    needed, found = set(owned), dict[tuple[int, ...], list[int]]()
    for node in program.nodes:
        if node.outputs in stacks:
            owned.update(node.outputs)
        elif any(number_of(a) in owned for a in node.inputs):
            owned.update(node.outputs)
            if values := _stacks(program, node):
                found[node.outputs] = values
                needed.update(values if _is_whole(node) else ())
    for node in reversed(program.nodes):
        leads = not needed.isdisjoint(node.outputs)
        if leads and node.during.phase == UPDATE:
            needed.update(a for a in node.inputs if isinstance(a, int))
        elif node.outputs in found and not _is_whole(node):
            del found[node.outputs]
    return found


def _is_whole(node: Node) -> bool:
    """Whether an operation is more than one on each element."""
    return node.rule is None or not node.rule.flat


def _divided(
    program: Program, stacks: dict[tuple[int, ...], list[int]], axes: Axes
) -> Program:
    """The program with these operands of nodes split along the first dimension."""
    values = {value for operands in stacks.values() for value in operands}
    readers = {outputs[0] for outputs in stacks}
    name = axes.names[axes.stored]
    split = functools.partial(split_of_state, axis=name, dim=0)
    return with_operands(program, (), values, readers, split)
