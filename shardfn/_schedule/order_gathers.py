"""Makes a loop over layers gather its weights in the order of their use.

In: a plan. Out: the plan, in which a loop that sends for about as long as it computes,
or one of which gathers run ahead, begins its gathers in turn. XLA for GPUs begins a
gather so early that, by its figures, it ends when it is used. It does not know that one
waits for another, and takes H100s' network for half as fast as it is; so it begins the
largest ones first, and the first product of a layer waits for weights that the last one
needs. Here a gather waits for a product that is computed a while before its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardfn._core.plan import Ahead, Apply, BodyPlan, Ref, Reshard, Step, reads
from shardfn._core.program import Node, Program
from shardfn._core.reasons import Note, noted
from shardfn._core.sharding import Axes
from shardfn._schedule.balanced_loops import (
    hides_transfers,
    is_balanced,
    scattered_sums,
)
from shardfn._schedule.bodies import all_moves, given_to, inside, with_nodes
from shardfn._schedule.coming_gathers import among_the_rest
from shardfn._schedule.first_uses import first_uses, gathered_ahead, waits_for

_BALANCED = (
    "begins in turn, as the loop computes for about as long as it sends "
    "(limits.BALANCED_FLOPS), most of it of large weights (limits.BALANCED_BYTES) and "
    "parts (limits.SUMS_PART), "
)
IN_TURN = Note(
    "order_gathers",
    f"{_BALANCED}not too much for one operand (limits.BALANCED_SHARE)",
)
AHEAD = Note(
    "order_gathers",
    f"{_BALANCED}and has its first weights gathered ahead",
)
HIDDEN = Note(
    "order_gathers",
    "begins in turn, as the loop computes for longer than it sends (limits.SUMS_FLOPS) "
    "between hosts, most of it of large parts (limits.SUMS_PART), and has its first "
    "weights gathered ahead",
)


def gathers_ahead(node: Node, loop: Apply, axes: Axes) -> bool:
    """Whether the first gathers of a loop are to run ahead, and the others in turn."""
    return axes.hides_network and _why_in_turn(node, loop, axes, ahead=True) is not None


def _why_in_turn(node: Node, loop: Apply, axes: Axes, ahead: bool) -> Note | None:
    """Why the gathers of a loop begin in turn, given whether some run ahead."""
    if node.kind != "scan" or node.is_unrolled or not axes.times_transfers:
        return None
    if is_balanced(node, loop, axes, ahead):
        return AHEAD if ahead else IN_TURN
    return HIDDEN if ahead and hides_transfers(node, loop, axes) else None


def order_gathers(program: Program, body: BodyPlan, axes: Axes) -> BodyPlan:
    """Orders the gathers of loops that send for about as long as they compute, and of
    those that compute for longer and of which the first gathers run ahead.

    Args:
      program: the program.
      body: its plan; a loop of which more than the first runs ahead stays as it is.
      axes: the mesh axes.

    Returns:
      The plan; the same where the compiler does not schedule by how long transfers
      take.
    """
    if not axes.times_transfers:
        return body
    body = inside(program, body, lambda p, b: order_gathers(p, b, axes))
    return with_nodes(program, body, lambda node, loop: _ordered(node, loop, axes))


def _ordered(node: Node, loop: Apply, axes: Axes) -> Apply:
    """A node, in turn if it is such a loop."""
    runs_ahead = bool(loop.ahead)
    note = _why_in_turn(node, loop, axes, runs_ahead)
    if note is None:
        return loop
    (program,), ahead = node.bodies, gathered_ahead(loop)
    if runs_ahead:
        if not axes.hides_network or not all(map(_is_first, loop.ahead)):
            return loop
        loop = among_the_rest(node, loop, note, in_front=note is AHEAD)
        # Or a compiler may wait for sums in front of products that are left to compute.
        has_sums = note is AHEAD and bool(scattered_sums(node, loop))
        loop = replace(loop, stacks_last=has_sums)
    return replace(loop, bodies=(_in_turn(program, loop.bodies[0], ahead, note),))


def _is_first(ahead: Ahead) -> bool:
    """Whether what runs ahead is what the next iteration uses first."""
    moves = all_moves(ahead.part)
    return ahead.lead == 1 and all(m.used_first or not m.gathers_state for m in moves)


def orders_gathers(body: BodyPlan) -> bool:
    """Whether gathers in a plan begin in turn."""
    return any(move.in_turn for move in all_moves(body))


def _in_turn(
    program: Program, body: BodyPlan, ahead: Mapping[Ref, int], note: Note
) -> BodyPlan:
    """A body, and the calls in it, in which gathers wait for products."""
    steps: list[Step] = []
    for step in body.steps:
        if isinstance(step, Apply) and (node := program.nodes[step.node]).is_call:
            (called,), (inner, *others) = node.bodies, step.bodies
            given = given_to(called, step, ahead)
            inner = _in_turn(called, inner, given, note)
            step = replace(step, bodies=(inner, *others))
        steps.append(step)
    body = replace(body, steps=tuple(steps))
    uses, waits = first_uses(program, body, ahead), dict[Ref, Ref]()
    for at, later in enumerate(uses):
        if (token := waits_for(uses, at)) is not None:
            waits.update(dict.fromkeys(later.all_gathers, token))
    return _waiting(program, body, waits, note)


def _waiting(
    program: Program, body: BodyPlan, waits: Mapping[Ref, Ref], note: Note
) -> BodyPlan:
    """A body whose gathers stand right behind what they wait for, in front of all else
    that uses that."""
    own = {
        step.result: step
        for step in body.steps
        if isinstance(step, Reshard) and step.result in waits
    }
    pending = {
        ref: replace(step, after=waits[ref], in_turn=True, notes=noted(step, note))
        for ref, step in own.items()
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
            # What is read before what it would wait for waits for nothing.
            for ref in [r for r in reads(step) if pending.pop(r, None) is not None]:
                put(own[ref])
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
