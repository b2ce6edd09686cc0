"""Which leaves in the host's memory a step takes slices of, or does not read.

In: a step of a plan, and the versions that live in the host's memory. Out: those of
which the step needs no whole copy on the device.
"""

from collections.abc import Collection

from shardfn._core.plan import Apply, Ref, Step, reads
from shardfn._core.program import Node, Program


def scanned(program: Program, step: Step, host: Collection[Ref]) -> frozenset[Ref]:
    """The versions that a scan goes through and reads nowhere else; and those that a
    call is given and does not read, as where what is made of them runs ahead.

    Args:
      program: the program.
      step: a step of its plan.
      host: the versions that live in the host's memory.

    Returns:
      Those of them that stay there.
    """
    if not isinstance(step, Apply):
        return frozenset()
    node = program.nodes[step.node]
    if node.is_call:
        return _unread(node, step, host)
    if node.kind != "scan" or node.is_unrolled:
        return frozenset()
    slices, every = node.sliced(step.operands), reads(step)
    arguments = node.sliced(node.bodies[0].inputs)
    every_plan = (*step.bodies, *(a.part for a in step.ahead))
    out = {ref for plan in every_plan for ref in (*plan.exports, *plan.handed)}
    return frozenset(
        ref
        for ref, value in zip(slices, arguments, strict=True)
        if ref is not None and ref in host and Ref(value) not in out
        if every.count(ref) == slices.count(ref)
    )


def _unread(node: Node, step: Apply, host: Collection[Ref]) -> frozenset[Ref]:
    (body,), (plan,) = node.bodies, step.bodies
    inside = {ref for each in plan.steps for ref in reads(each)}
    inside |= plan.leaving
    given = [
        (ref, Ref(value) in inside)
        for ref, value in zip(step.operands, body.inputs, strict=True)
        if ref is not None and ref in host
    ]
    used = {ref for ref, is_read in given if is_read} | {*step.imports}
    return frozenset(ref for ref, _ in given if ref not in used)
