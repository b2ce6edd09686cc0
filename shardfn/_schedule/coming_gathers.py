"""Puts what a loop gathers for its next iteration among what it does in this one.

In: a loop of which gathers run ahead, and whose other gathers begin in turn. Out: the
loop, in which those ahead come behind the others, and where the network is what it
waits for in front of its sums. A compiler that sees nothing between them begins them
with the iteration, and what this one needs waits; or with its end, which then waits.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from shardfn._core.limits import CHAINED_BYTES
from shardfn._core.plan import Ahead, Apply, BodyPlan, Ref, Reshard, Site, Step
from shardfn._core.program import Node, Program
from shardfn._core.reasons import Note
from shardfn._schedule.balanced_loops import scattered_sums
from shardfn._schedule.bodies import all_moves
from shardfn._schedule.first_uses import gathered_ahead, moved_whole, uses_in, waits_for
from shardfn._schedule.moved_ahead import Kind, moved_ahead
from shardfn._schedule.versions import fresh_each, tied


def among_the_rest(node: Node, loop: Apply, note: Note, in_front: bool) -> Apply:
    """A loop whose gathers for the next iteration have their place in this one.

    Args:
      node: the loop.
      loop: its plan.
      note: why.
      in_front: whether they are to come in front of its sums, if it has large ones, and
        not only behind a product.

    Returns:
      The plan; the same if no product comes in front of the last.
    """
    site = _first_large_sum(node, loop) if in_front else None
    if site is None or any(_stay_in_bits(each) for each in loop.ahead):
        return _behind_product(node, loop, note)
    (program,), (body,) = node.bodies, loop.bodies
    for each in loop.ahead:
        values = [ref.value for ref in each.part.exports]
        tie = _InFront(site[1], note).tie
        body, made = _through(program, body, values, site, tie)
        body = replace(body, handed=(*body.handed, *made))
    ahead = tuple(replace(each, handed=True) for each in loop.ahead)
    return replace(loop, bodies=(body,), ahead=ahead)


def _behind_product(node: Node, loop: Apply, note: Note) -> Apply:
    """A loop whose gathers for the next iteration wait for what one more gather of this
    one would wait for, if that is a product."""
    (program,), (body,) = node.bodies, loop.bodies
    every = uses_in(program, body, gathered_ahead(loop))
    may_import = [each for each in every if _are_remats(program, each.within)]
    most = max(may_import, key=lambda each: len(each.uses))
    token = waits_for(most.uses, len(most.uses))
    if token is None or not any(token in each.results for each in most.uses):
        return loop
    ahead: list[Ahead] = []
    for each in loop.ahead:
        moved = moved_ahead(program, each.part)
        values, kinds = [m.origin.value for m in moved], [m.kind for m in moved]
        tie = _Behind(token, kinds, note).tie
        body, made = _through(program, body, values, (most.within, token), tie)
        body = replace(body, handed=(*body.handed, *made))
        ahead.append(replace(each, tied=tuple(m.site for m in moved)))
    return replace(loop, bodies=(body,), ahead=tuple(ahead))


def _are_remats(program: Program, within: tuple[int, ...]) -> bool:
    """Whether the calls around something can import: those of custom derivatives, which
    are left in steps without gradients, do not."""
    for at in within:
        if program.nodes[at].kind != "remat":
            return False
        program = program.nodes[at].bodies[0]
    return True


def _stay_in_bits(ahead: Ahead) -> bool:
    """Whether some of what is gathered stays quantized: barriers take arrays alone."""
    return any(move.in_bits for move in all_moves(ahead.part))


def _first_large_sum(node: Node, loop: Apply) -> Site | None:
    """The first sum of an iteration that may wait, of those that are large."""
    sums = {
        site
        for site, each in scattered_sums(node, loop).items()
        if moved_whole(each.step) >= CHAINED_BYTES
        and each.step.after is None
        and each.step.together is None
        and _are_remats(node.bodies[0], site[0])
    }
    return next(_in_order(node.bodies[0], loop.bodies[0], (), sums), None)


def _in_order(
    program: Program, body: BodyPlan, within: tuple[int, ...], sites: set[Site]
) -> Iterator[Site]:
    """Some of what a body, and calls in it, move, in their order."""
    for step in body.steps:
        if isinstance(step, Reshard):
            if (within, step.result) in sites:
                yield within, step.result
        elif (node := program.nodes[step.node]).is_call:
            (called,), (inner,) = node.bodies, step.bodies
            yield from _in_order(called, inner, (*within, step.node), sites)


Ties = Callable[[Program, BodyPlan, Sequence[Ref]], tuple[BodyPlan, Sequence[Ref]]]
"""From a body, and what it imports, to the body and what that has become."""


def _through(
    program: Program, body: BodyPlan, values: Sequence[int], site: Site, tie: Ties
) -> tuple[BodyPlan, Sequence[Ref]]:
    """A body that imports more, and calls in it that do and export it, as `tie` leaves
    it where the site is.

    Args:
      program: the body's program.
      body: its plan.
      values: those that what is imported is named after.
      site: in which calls of the body.
      tie: what is done there.

    Returns:
      The plan, and what it has become there.
    """
    given, (within, ref) = fresh_each(body, values), site
    body = replace(body, imports=(*body.imports, *given))
    if not within:
        return tie(program, body, given)
    steps: list[Step] = []
    made = fresh_each(body, values)
    for step in body.steps:
        if isinstance(step, Apply) and step.node == within[0]:
            (called,), (inner,) = program.nodes[step.node].bodies, step.bodies
            names = [called.inputs[0]] * len(values)
            inner, last = _through(called, inner, names, (within[1:], ref), tie)
            inner = replace(inner, exports=(*inner.exports, *last))
            step = replace(
                step,
                bodies=(inner,),
                imports=(*step.imports, *given),
                exports=(*step.exports, *made),
            )
        steps.append(step)
    return replace(body, steps=tuple(steps)), made


@dataclass(frozen=True, slots=True)
class _Behind:
    """Lets what is imported, each like one of `kinds`, wait for a product."""

    product: Ref
    kinds: Sequence[Kind]
    note: Note

    def tie(
        self, program: Program, body: BodyPlan, given: Sequence[Ref]
    ) -> tuple[BodyPlan, Sequence[Ref]]:
        made = fresh_each(body, [ref.value for ref in given])
        steps: list[Step] = []
        for step in body.steps:
            steps.append(step)
            if isinstance(step, Apply):
                node = program.nodes[step.node]
                if self.product in map(Ref, node.outputs):
                    steps += [
                        _noted(tied(a, b, *kind, node.during, self.product), self.note)
                        for a, b, kind in zip(given, made, self.kinds, strict=True)
                    ]
        return replace(body, steps=tuple(steps)), made


@dataclass(frozen=True, slots=True)
class _InFront:
    """Lets a sum wait for what is imported."""

    sum: Ref
    note: Note

    def tie(
        self, program: Program, body: BodyPlan, given: Sequence[Ref]
    ) -> tuple[BodyPlan, Sequence[Ref]]:
        steps: list[Step] = []
        for step in body.steps:
            if isinstance(step, Reshard) and step.result == self.sum:
                value, source = step.source.value, step.source
                kind = program.avals[value], step.path[0]
                results = fresh_each(body, [value] * len(given))
                for ref, result in zip(given, results, strict=True):
                    waiting = tied(source, result, *kind, step.during, ref)
                    steps.append(_noted(waiting, self.note))
                    source = result
                step = replace(step, source=source)
            steps.append(step)
        return replace(body, steps=tuple(steps)), given


def _noted(move: Reshard, note: Note) -> Reshard:
    """A move that waits in turn, and why."""
    return replace(move, in_turn=True, notes=(note,))
