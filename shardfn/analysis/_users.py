"""What versions of values are moved for.

In: a program and its plan. Out: for each version, the line of the user's code that
needs it, and the primitive without a rule, also in a body, that runs on it.
"""

from shardfn._core.errors import where
from shardfn._core.plan import BodyPlan, Ref, Reshard
from shardfn._core.program import Program

User = tuple[str, str]
"""A line of the user's code; a primitive that has no rule, or ""."""


def users_of(program: Program, body: BodyPlan) -> dict[Ref, User]:
    """Per version: the source line that first needs it, and the primitive if it is
    there only because that has no rule."""
    users: dict[Ref, User] = {}
    made_by = {v: node for node in program.nodes for v in node.outputs}
    ruleless = _ruleless(program, body) if body.falls_back else {}
    for step in body.steps:
        if isinstance(step, Reshard):
            if step.source.version == 0 and step.result not in users:
                if step.source.value in made_by:
                    eqn = made_by[step.source.value].eqn
                    users[step.result] = (where(eqn), "")
            continue
        place = None
        for ref in step.operands:
            if ref is None or ref.version == 0:
                continue
            if ref in ruleless:
                users[ref] = ruleless[ref]
            elif ref not in users:
                place = place or where(program.nodes[step.node].eqn)
                users[ref] = (place, "")
    return users


def _ruleless(program: Program, body: BodyPlan) -> dict[Ref, User]:
    """What primitives without a rule read, in bodies as it enters them."""
    found: dict[Ref, User] = {}
    for step in body.steps:
        if isinstance(step, Reshard):
            continue
        node = program.nodes[step.node]
        if step.fallback:
            user = where(node.eqn), step.primitive
            found |= {ref: user for ref in step.operands if ref is not None}
        for inner, plan, region in zip(
            node.bodies, step.bodies, node.regions, strict=True
        ):
            inside = _ruleless(inner, plan) if plan.falls_back else {}
            for value, operand in zip(inner.inputs, region.operands, strict=True):
                ref = step.operands[operand]
                if ref is not None and Ref(value) in inside:
                    found.setdefault(ref, inside[Ref(value)])
    return found
