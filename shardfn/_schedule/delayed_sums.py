"""What a compiler delays by an iteration: reduce-scatters whose results a loop stacks.

In: the plan of a loop's body. Out: its sums that only lead to what the loop stacks, and
the bytes of their terms. XLA for GPUs sums what one iteration has made while the next
one computes, and once behind the loop, so the terms of an iteration live through the
one that follows, but for sums that the plan does not let it delay (`undelayed_sums`).
Of sums over several mesh axes it delays what comes behind the reduce-scatter.
"""

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass

from shardfn._core.moves import scatters_of
from shardfn._core.plan import Apply, BodyPlan, Ref, Reshard
from shardfn._core.program import Node, Program
from shardfn._core.sharding import Axes, Sharding, Unreduced
from shardfn._core.sizes import local_bytes


@dataclass(frozen=True, slots=True)
class StackedSum:
    """A sum whose result a loop stacks.

    Attributes:
      program: the program that it is in.
      step: the sum.
      within: the nodes of the calls that it is in, from the loop's body inwards.
    """

    program: Program
    step: Reshard
    within: tuple[int, ...]

    def term_bytes(self, axes: Axes) -> int:
        """Bytes of a device's term."""
        aval = self.program.avals[self.step.source.value]
        return local_bytes(aval, self.step.path[0], axes)

    @property
    def scattered(self) -> Sharding | None:
        """What its reduce-scatters leave, if that is summed over other mesh axes, too,
        such as replicas; else None."""
        count = scatters_of(self.step.moves)
        return self.step.path[count] if count else None

    def delayed_bytes(self, axes: Axes) -> int:
        """Bytes on a device of what the compiler delays."""
        if self.step.undelayed:
            return 0
        if self.scattered is None:
            return self.term_bytes(axes)
        aval = self.program.avals[self.step.source.value]
        return local_bytes(aval, self.scattered, axes)

    def part_bytes(self, axes: Axes) -> int:
        """Bytes of the sum that stay on a device."""
        aval = self.program.avals[self.step.result.value]
        return local_bytes(aval, self.step.path[-1], axes)


def delayed_sums(node: Node, step: Apply, axes: Axes) -> int:
    """Bytes of one iteration's terms that live on in the next.

    Args:
      node: a loop.
      step: its plan.
      axes: the mesh axes.

    Returns:
      The bytes; none for a loop that stacks nothing, or that is written out.
    """
    return sum(each.delayed_bytes(axes) for each in stacked_sums(node, step))


def are_left_to_compiler(sums: Iterable[StackedSum], axes: Axes) -> bool:
    """Whether the compiler orders the sums of a loop, and delays what of them is over
    other mesh axes than those that they are scattered over: between hosts."""
    return axes.hides_network and any(each.scattered is not None for each in sums)


def leaves_sums(program: Program, body: BodyPlan, axes: Axes) -> bool:
    """Whether a plan has loops whose sums are left to the compiler."""
    for step in body.steps:
        if isinstance(step, Apply):
            node = program.nodes[step.node]
            inner = zip(node.bodies, step.bodies, strict=True)
            if are_left_to_compiler(stacked_sums(node, step), axes):
                return True
            if any(leaves_sums(p, b, axes) for p, b in inner):
                return True
    return False


def stacked_sums(node: Node, step: Apply) -> list[StackedSum]:
    """The sums of an iteration that only lead to what a loop stacks.

    Args:
      node: a node of a program.
      step: its plan.

    Returns:
      The sums; none if it is not a loop that stacks something, or is written out.
    """
    if node.kind != "scan" or node.is_unrolled:
        return []
    (program,), (body,), (region,) = node.bodies, step.bodies, node.regions
    return [*_leading(program, body, set(region.stacks), ())]


def _leading(
    program: Program, body: BodyPlan, stacked: Set[int], within: tuple[int, ...]
) -> Iterator[StackedSum]:
    """The sums that only lead to the results at `stacked`."""
    out = {body.outputs[i] for i in stacked}
    elsewhere = {r for i, r in enumerate(body.outputs) if i not in stacked}
    for step in reversed(body.steps):
        if isinstance(step, Reshard) and step.result in out - elsewhere:
            first, last = step.path[0], step.path[-1]
            if _is_term(first) and not _is_term(last):
                yield StackedSum(program, step, within)
            else:
                out.add(step.source)
        elif isinstance(step, Apply):
            node = program.nodes[step.node]
            made = [Ref(v) for v in node.outputs]
            mine = {i for i, ref in enumerate(made) if ref in out - elsewhere}
            if node.is_call and mine:
                (inner,), (plan,) = node.bodies, step.bodies
                yield from _leading(inner, plan, mine, (*within, step.node))
            elif node.kind == "op" and mine and len(mine) == len(made):
                out.update(r for r in step.operands if r is not None)


def _is_term(sharding: Sharding) -> bool:
    return any(isinstance(x, Unreduced) for x in sharding)
