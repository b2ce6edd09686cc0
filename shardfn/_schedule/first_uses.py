"""In which order the iteration of a loop over layers uses the weights that it gathers.

In: the plan of a body. Out: its products with large gathered weights, those of one
operand together, and what the loop gathers ahead for it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardfn._core.equation_flops import flops_of
from shardfn._core.limits import CHAINED_BYTES
from shardfn._core.plan import Apply, BodyPlan, Ref, Reshard, reads
from shardfn._core.program import Program
from shardfn._schedule.bodies import given_to


@dataclass(slots=True)
class FirstUses:
    """Products with gathered weights that multiply the same, in their order.

    Attributes:
      others: what they multiply besides the weights.
      gathers: of each, the gathers that it is the first to use.
      results: what each makes.
      size: bytes of all these weights.
      ahead: whether an earlier iteration gathers them.
    """

    others: frozenset[Ref]
    gathers: list[frozenset[Ref]] = field(default_factory=list)
    results: list[Ref] = field(default_factory=list)
    size: int = 0
    ahead: bool = False

    @property
    def all_gathers(self) -> frozenset[Ref]:
        """The gathers of all of them."""
        return frozenset[Ref]().union(*self.gathers)


@dataclass(frozen=True, slots=True)
class BodyUses:
    """First uses in a body, or in a call in it.

    Attributes:
      within: the calls that it is in.
      uses: in their order.
    """

    within: tuple[int, ...]
    uses: tuple[FirstUses, ...]


def uses_in(
    program: Program,
    body: BodyPlan,
    ahead: Mapping[Ref, int],
    within: tuple[int, ...] = (),
) -> Iterator[BodyUses]:
    """First uses in a body, then those in each of the calls in it."""
    yield BodyUses(within, tuple(first_uses(program, body, ahead)))
    for step in body.steps:
        if isinstance(step, Apply) and (node := program.nodes[step.node]).is_call:
            (called,), (inner,) = node.bodies, step.bodies
            given = given_to(called, step, ahead)
            yield from uses_in(called, inner, given, (*within, step.node))


def first_uses(
    program: Program, body: BodyPlan, ahead: Mapping[Ref, int]
) -> list[FirstUses]:
    """The first uses of what is large and gathered.

    Args:
      program: the program of a body.
      body: its plan.
      ahead: bytes of what it imports that is gathered already.

    Returns:
      Them, in their order.
    """
    found: list[FirstUses] = []
    made_of = {ref: frozenset({ref}) for ref in ahead}
    sizes = dict(ahead)
    used = frozenset[Ref]()
    for step in body.steps:
        read = reads(step)
        origins = frozenset[Ref]().union(*(made_of.get(r, frozenset()) for r in read))
        if isinstance(step, Reshard):
            if _stands_alone(step):
                origins |= {step.result}
                sizes[step.result] = moved_whole(step)
            made_of[step.result] = origins
            continue
        node = program.nodes[step.node]
        if node.kind == "op" and flops_of(node.eqn):
            if new := origins - used:
                others = frozenset(r for r in read if not made_of.get(r, used) & new)
                if not found or found[-1].others != others:
                    found.append(FirstUses(others, ahead=not new.isdisjoint(ahead)))
                found[-1].gathers.append(new)
                found[-1].results.append(Ref(node.outputs[0]))
                found[-1].size += sum(sizes[r] for r in new)
                used |= new
            origins = frozenset()
        made_of.update(dict.fromkeys([*map(Ref, node.outputs), *step.exports], origins))
    return found


def waits_for(uses: Sequence[FirstUses], at: int) -> Ref | None:
    """What the gathers of one of a body's uses wait for.

    Those that are used second wait for the first product, or if that is alone for its
    gather, others for the last product of those used two before them. So each has the
    products between beside it. Where the weights of those two before are there already,
    and are not the first, they wait for what those multiply: the network is free then.

    Args:
      uses: the body's first uses.
      at: which of them; their number for one more behind them.

    Returns:
      It: a product, what one multiplies, or of the second of two the first's gather.
      None for the first that this iteration gathers.
    """
    if at <= sum(each.ahead for each in uses):
        return None
    first = uses[0]
    if at > 1:
        before = uses[at - 2]
        if before.ahead and 2 < at < len(uses) and len(before.others) == 1:
            return next(iter(before.others))
        return before.results[-1]
    if len(first.results) > 1:
        return first.results[0]
    return min(first.gathers[0], key=lambda ref: (ref.value, ref.version))


def gathered_ahead(loop: Apply) -> dict[Ref, int]:
    """Bytes of the large weights that earlier iterations of a loop gather for it."""
    return {
        ref: size
        for ahead in loop.ahead
        for ref, size in _gathered(ahead.part).items()
        if size >= CHAINED_BYTES
    }


def _gathered(part: BodyPlan) -> dict[Ref, int]:
    """Bytes of what a part exports that moves in it, or in calls in it, make."""
    made: dict[Ref, int] = {}
    for step in part.steps:
        if isinstance(step, Reshard):
            made[step.result] = moved_whole(step)
        elif step.exports:
            inner = _gathered(step.bodies[0])
            pairs = zip(step.exports, step.bodies[0].exports, strict=True)
            made |= {ref: inner[of] for ref, of in pairs if of in inner}
    return {ref: made[ref] for ref in part.exports if ref in made}


def moved_whole(step: Reshard) -> int:
    """Bytes of the whole value of a move."""
    return math.prod(step.shape) * step.itemsize


def _stands_alone(step: Reshard) -> bool:
    alone = step.after is None and step.together is None
    return step.gathers_state and alone and moved_whole(step) >= CHAINED_BYTES
