"""What a compiler delays by an iteration: reduce-scatters whose results a loop stacks.

In: the plan of a loop's body. Out: bytes of the terms that wait for them. XLA for GPUs
sums what one iteration has made while the next one computes, and once behind the loop,
so the terms of an iteration live through the one that follows.
"""

from collections.abc import Set

from shardfn._core.plan import Apply, BodyPlan, Ref, Reshard
from shardfn._core.program import Node, Program
from shardfn._core.sharding import Axes, Sharding, Unreduced
from shardfn._core.sizes import local_bytes


def delayed_sums(node: Node, step: Apply, axes: Axes) -> int:
    """Bytes of one iteration's terms that live on in the next.

    Args:
      node: a loop.
      step: its plan.
      axes: the mesh axes.

    Returns:
      The bytes; none for a loop that stacks nothing, or that is written out.
    """
    if node.kind != "scan" or node.is_unrolled:
        return 0
    (program,), (body,), (region,) = node.bodies, step.bodies, node.regions
    return _waiting(program, body, set(region.stacks), axes)


def _waiting(program: Program, body: BodyPlan, stacked: Set[int], axes: Axes) -> int:
    """Bytes of the terms whose sums only lead to the results at `stacked`."""
    out = {body.outputs[i] for i in stacked}
    elsewhere = {r for i, r in enumerate(body.outputs) if i not in stacked}
    total = 0
    for step in reversed(body.steps):
        if isinstance(step, Reshard) and step.result in out - elsewhere:
            first, last = step.path[0], step.path[-1]
            if _is_term(first) and not _is_term(last):
                total += local_bytes(program.avals[step.source.value], first, axes)
            else:
                out.add(step.source)
        elif isinstance(step, Apply):
            node = program.nodes[step.node]
            made = [Ref(v) for v in node.outputs]
            mine = {i for i, ref in enumerate(made) if ref in out - elsewhere}
            if node.is_call and mine:
                (inner,), (plan,) = node.bodies, step.bodies
                total += _waiting(inner, plan, mine, axes)
            elif node.kind == "op" and mine and len(mine) == len(made):
                out.update(r for r in step.operands if r is not None)
    return total


def _is_term(sharding: Sharding) -> bool:
    return any(isinstance(x, Unreduced) for x in sharding)
