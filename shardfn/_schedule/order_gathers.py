"""Makes a loop over layers gather its weights in the order of their use.

In: a plan. Out: the plan, in which a loop that sends for about as long as it computes
begins its gathers in turn. XLA for GPUs begins a gather so early that, by its figures,
it ends when it is used. It does not know that one waits for another, and takes H100s'
network for half as fast as it is; so it begins the largest ones first, and the first
product of a layer waits for weights that the last one needs. Here a gather waits for a
product that is computed a while before its own. XLA knows the network of later GPUs.
"""

from collections.abc import Sequence
from dataclasses import replace

from shardfn._core.plan import Apply, BodyPlan, Ref, Reshard, Step, reads
from shardfn._core.program import Program
from shardfn._core.reasons import Note, noted
from shardfn._core.sharding import Axes
from shardfn._schedule.balanced_loops import FirstUses, first_uses, is_balanced
from shardfn._schedule.bodies import inside

IN_TURN = Note(
    "order_gathers",
    "begins in turn, as the loop computes for about as long as it sends "
    "(limits.BALANCED_FLOPS), most of it of large weights (limits.BALANCED_BYTES) and "
    "parts (limits.SUMS_PART), not too much for one operand (limits.BALANCED_SHARE)",
)


def order_gathers(program: Program, body: BodyPlan, axes: Axes) -> BodyPlan:
    """Orders the gathers of loops that send for about as long as they compute.

    Args:
      program: the program.
      body: its plan; a loop of which something runs ahead stays as it is.
      axes: the mesh axes.

    Returns:
      The plan; the same where the compiler does not schedule by how long transfers
      take.
    """
    if not axes.times_transfers:
        return body
    body = inside(program, body, lambda p, b: order_gathers(p, b, axes))
    steps: list[Step] = []
    for step in body.steps:
        if isinstance(step, Apply):
            node = program.nodes[step.node]
            is_loop = node.kind == "scan" and not node.is_unrolled and not step.ahead
            if is_loop and is_balanced(node, step, axes):
                ordered = _in_turn(node.bodies[0], step.bodies[0])
                step = replace(step, bodies=(ordered,))
        steps.append(step)
    return replace(body, steps=tuple(steps))


def orders_gathers(body: BodyPlan) -> bool:
    """Whether gathers in a plan begin in turn."""
    return any(
        step.in_turn
        if isinstance(step, Reshard)
        else any(map(orders_gathers, step.bodies))
        for step in body.steps
    )


def _in_turn(program: Program, body: BodyPlan) -> BodyPlan:
    """A body, and the calls in it, in which gathers wait for products."""
    steps: list[Step] = []
    for step in body.steps:
        if isinstance(step, Apply) and (node := program.nodes[step.node]).is_call:
            inner = _in_turn(node.bodies[0], step.bodies[0])
            step = replace(step, bodies=(inner, *step.bodies[1:]))
        steps.append(step)
    body = replace(body, steps=tuple(steps))
    return _waiting(program, body, _waits(first_uses(program, body)))


def _waits(uses: Sequence[FirstUses]) -> dict[Ref, Ref]:
    """What each gather but the first ones waits for.

    Those that are used second wait for the first product, or if that is alone for its
    gather, others for the last product of those used two before them. So each has the
    products between beside it.
    """
    waits: dict[Ref, Ref] = {}
    for at, later in enumerate(uses[1:], 1):
        first = uses[0]
        if at > 1:
            token = uses[at - 2].results[-1]
        elif len(first.results) > 1:
            token = first.results[0]
        else:
            token = min(first.gathers[0], key=lambda ref: (ref.value, ref.version))
        waits.update(dict.fromkeys(frozenset[Ref]().union(*later.gathers), token))
    return waits


def _waiting(program: Program, body: BodyPlan, waits: dict[Ref, Ref]) -> BodyPlan:
    """A body whose gathers stand right behind what they wait for, in front of all that
    uses it."""
    pending = {
        step.result: replace(
            step,
            after=waits[step.result],
            in_turn=True,
            notes=noted(step, IN_TURN),
        )
        for step in body.steps
        if isinstance(step, Reshard) and step.result in waits
    }
    steps: list[Step] = []
    made = {Ref(v) for v in program.inputs} | {Ref(v) for v, _ in program.constants}
    made |= set(body.imports)

    def put(step: Step) -> None:
        steps.append(step)
        if isinstance(step, Reshard):
            made.update(step.makes)
        else:
            made.update(map(Ref, program.nodes[step.node].outputs), step.exports)
        ready = [r for r, move in pending.items() if made.issuperset(reads(move))]
        for move in [pending.pop(r) for r in ready]:
            put(move)

    # What is gathered is made in front of all, or it would come behind the product.
    first = _made_of_inputs(program, body, [m.source for m in pending.values()])
    ops = [s for s in body.steps if isinstance(s, Apply) and s.node in first]
    rest = (s for s in body.steps if not isinstance(s, Apply) or s.node not in first)
    for step in (*ops, *rest):
        if not isinstance(step, Reshard) or step.result not in waits:
            put(step)
    return replace(body, steps=tuple(steps))


def _made_of_inputs(
    program: Program, body: BodyPlan, values: Sequence[Ref]
) -> frozenset[int]:
    """The operations, such as casts, that make values of what comes in alone."""
    known = {Ref(v) for v in program.inputs} | {Ref(v) for v, _ in program.constants}
    known |= set(body.imports)
    nodes = dict[Ref, int]()
    for step in body.steps:
        if isinstance(step, Apply) and (node := program.nodes[step.node]).kind == "op":
            if not node.eqn.effects and known.issuperset(reads(step)):
                made = [Ref(v) for v in node.outputs]
                known.update(made)
                nodes.update(dict.fromkeys(made, step.node))
    found, left = set[int](), [ref for ref in values if ref in nodes]
    by_node = {s.node: s for s in body.steps if isinstance(s, Apply)}
    while left:
        node = nodes[left.pop()]
        if node not in found:
            found.add(node)
            left += [ref for ref in reads(by_node[node]) if ref in nodes]
    return frozenset(found)
