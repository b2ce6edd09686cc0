"""Puts what a loop gathers for its next iteration among what it does in this one.

In: a loop of which gathers run ahead, and whose other gathers begin in turn. Out: the
loop, in which those ahead come behind the others, and where the network is what it
waits for in front of its sums. A compiler that sees nothing between them begins them
with the iteration, and what this one needs waits; or with its end, which then waits.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from shardfn._core.limits import CHAINED_BYTES
from shardfn._core.plan import Ahead, Apply, BodyPlan, Ref, Reshard, Step, reads
from shardfn._core.program import Node, Program
from shardfn._core.reasons import Note
from shardfn._core.sharding import Sharding
from shardfn._core.sizes import itemsize
from shardfn._schedule.balanced_loops import scattered_sums
from shardfn._schedule.bodies import Site
from shardfn._schedule.first_uses import gathered_ahead, moved_whole, uses_in, waits_for
from shardfn._schedule.versions import fresh


def behind_products(node: Node, loop: Apply, note: Note) -> Apply:
    """A loop whose gathers for the next iteration wait for a product of this one.

    They are used after all that this one gathers. So they wait for what one more gather
    of it would wait for.

    Args:
      node: the loop.
      loop: its plan.
      note: why.

    Returns:
      The plan; the same if no product comes in front of the last.
    """
    (program,), (body,), (region,) = node.bodies, loop.bodies, node.regions
    every = uses_in(program, body, gathered_ahead(loop))
    most = max(every, key=lambda each: len(each.uses))
    token = waits_for(most.uses, len(most.uses))
    if token is None:
        return loop
    ahead: list[Ahead] = []
    for each in loop.ahead:
        read = {ref for step in each.part.steps for ref in reads(step)}
        inputs = [i for i in region.slices if Ref(program.inputs[i]) in read]
        values = [program.inputs[i] for i in inputs]
        kinds = [
            _Kind.of(program, v, body.inputs[i])
            for v, i in zip(values, inputs, strict=True)
        ]
        site = most.within, token
        body = _through(program, body, values, site, _Behind(token, kinds, note).tie)
        ahead.append(replace(each, tied=tuple(map(Ref, values))))
    return replace(loop, bodies=(body,), ahead=tuple(ahead))


def in_front_of_sums(node: Node, loop: Apply, note: Note) -> Apply:
    """A loop whose first large sum waits for what is gathered for the next iteration.

    Args:
      node: the loop.
      loop: its plan.
      note: why.

    Returns:
      The plan; the same if it has no such sum.
    """
    (program,), (body,) = node.bodies, loop.bodies
    sums = {
        site
        for site, each in scattered_sums(node, loop).items()
        if moved_whole(each.step) >= CHAINED_BYTES
        and each.step.after is None
        and each.step.together is None
    }
    site = next(_in_order(program, body, (), sums), None)
    if site is None:
        return loop
    for each in loop.ahead:
        values = [ref.value for ref in each.part.exports]
        body = _through(program, body, values, site, _InFront(site[1], note).tie)
    ahead = tuple(replace(each, handed=True) for each in loop.ahead)
    return replace(loop, bodies=(body,), ahead=ahead)


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
) -> BodyPlan:
    """A body that imports more, and exports it as `tie` leaves it where the site is.

    Args:
      program: the body's program.
      body: its plan.
      values: those that what is imported is named after.
      site: in which calls of the body.
      tie: what is done there.

    Returns:
      The plan.
    """
    given = list[Ref]()
    for value in values:
        given.append(fresh(body, value))
        body = replace(body, imports=(*body.imports, given[-1]))
    within, ref = site
    if not within:
        body, made = tie(program, body, given)
        return replace(body, exports=(*body.exports, *made))
    steps: list[Step] = []
    made = list[Ref]()
    for step in body.steps:
        if isinstance(step, Apply) and step.node == within[0]:
            (called,), (inner,) = program.nodes[step.node].bodies, step.bodies
            names = [called.inputs[0]] * len(values)
            inner = _through(called, inner, names, (within[1:], ref), tie)
            known = body
            for value in values:
                made.append(fresh(known, value))
                known = replace(known, imports=(*known.imports, made[-1]))
            step = replace(
                step,
                bodies=(inner,),
                imports=(*step.imports, *given),
                exports=(*step.exports, *made),
            )
        steps.append(step)
    return replace(body, steps=tuple(steps), exports=(*body.exports, *made))


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a value is like."""

    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    sharding: Sharding

    @classmethod
    def of(cls, program: Program, value: int, sharding: Sharding) -> "_Kind":
        aval = program.avals[value]
        return cls(tuple(aval.shape), str(aval.dtype), itemsize(aval), sharding)


@dataclass(slots=True)
class _Behind:
    """Lets what is imported wait for a product."""

    product: Ref
    kinds: Sequence[_Kind]
    note: Note
    made: list[Ref] = field(default_factory=list)

    def tie(
        self, program: Program, body: BodyPlan, given: Sequence[Ref]
    ) -> tuple[BodyPlan, Sequence[Ref]]:
        steps: list[Step] = []
        for step in body.steps:
            steps.append(step)
            if isinstance(step, Apply):
                node = program.nodes[step.node]
                if self.product in map(Ref, node.outputs):
                    steps += self.ties(node, body, given)
        return replace(body, steps=tuple(steps)), self.made

    def ties(self, node: Node, body: BodyPlan, given: Sequence[Ref]) -> Iterator[Step]:
        for source, kind in zip(given, self.kinds, strict=True):
            result = fresh(body, source.value)
            body = replace(body, imports=(*body.imports, result))
            self.made.append(result)
            yield Reshard(
                source=source,
                result=result,
                path=(kind.sharding,),
                shape=kind.shape,
                dtype=kind.dtype,
                itemsize=kind.itemsize,
                during=node.during,
                after=self.product,
                in_turn=True,
                notes=(self.note,),
            )


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
                source, aval = step.source, program.avals[step.source.value]
                for ref in given:
                    tied = fresh(
                        replace(body, steps=(*body.steps, *steps)), source.value
                    )
                    steps.append(
                        replace(
                            step,
                            source=source,
                            result=tied,
                            path=step.path[:1],
                            dtype=str(aval.dtype),
                            itemsize=itemsize(aval),
                            after=ref,
                            undelayed=False,
                            in_turn=True,
                            notes=(self.note,),
                        )
                    )
                    source = tied
                step = replace(step, source=source)
            steps.append(step)
        return replace(body, steps=tuple(steps)), given
