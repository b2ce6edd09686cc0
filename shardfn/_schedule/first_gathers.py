"""Marks what an iteration of a loop over layers gathers for its first products.

In: the plan of a loop's body. Out: the plan, in which a gather says so if, in the order
of the program, its value is used before a matrix product reads what another product
with a weight has made. Only products of their own kind are in front of these. Of loops
that gather in turn, so do all that are used before the largest, and all small ones.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from shardfn._core.equation_flops import flops_of
from shardfn._core.limits import CHAINED_BYTES
from shardfn._core.plan import BodyPlan, Ref, Reshard, Site, Step, reads
from shardfn._core.program import Node, Program
from shardfn._schedule.bodies import given_to
from shardfn._schedule.first_uses import moved_whole, uses_in


def mark_first_gathers(program: Program, body: BodyPlan, in_turn: bool) -> BodyPlan:
    """Marks the gathers of the state's leaves that a body uses first.

    Args:
      program: the body's program.
      body: its plan.
      in_turn: whether its loop gathers in turn. The first gather that an iteration
        makes is then to be its largest, since a compiler begins that first, and none of
        the small ones are to wait behind a large one.

    Returns:
      The plan; calls in it have marks, too, bodies of loops in it none.
    """
    visit = _Visit()
    visit.body(program, body, (), {})
    used, small = visit.used, 0
    if in_turn:
        used = used | set(_before_largest(program, body))
        small = CHAINED_BYTES
    return _marked(program, body, (), used, small)


def _before_largest(program: Program, body: BodyPlan) -> Iterator[Site]:
    """What is used before the products with the largest weights."""
    for each in uses_in(program, body, {}):
        sizes = [uses.size for uses in each.uses]
        for uses in each.uses[: sizes.index(max(sizes))] if sizes else ():
            yield from ((each.within, ref) for ref in uses.all_gathers)


def _marked(
    program: Program,
    body: BodyPlan,
    within: tuple[int, ...],
    used: set[Site],
    small: int,
) -> BodyPlan:
    """A body in which these gathers have marks, and all of less than `small` bytes."""
    steps: list[Step] = []
    for step in body.steps:
        if isinstance(step, Reshard):
            is_small = step.gathers_state and moved_whole(step) < small
            if is_small or (within, step.result) in used:
                step = replace(step, used_first=True)
        elif (node := program.nodes[step.node]).is_call:
            first, *others = step.bodies
            calls = (*within, step.node)
            inner = _marked(node.bodies[0], first, calls, used, small)
            step = replace(step, bodies=(inner, *others))
        steps.append(step)
    return replace(body, steps=tuple(steps))


@dataclass(slots=True)
class _Origin:
    """What a version depends on: gathers that no product has used yet, and whether on
    a product with a weight."""

    gathers: frozenset[Site] = frozenset()
    depends_on_product: bool = False

    @classmethod
    def of_all(cls, origins: Iterable["_Origin"]) -> "_Origin":
        each = list(origins)
        gathers = frozenset[Site]().union(*(o.gathers for o in each))
        return cls(gathers, any(o.depends_on_product for o in each))


@dataclass(slots=True)
class _Visit:
    """State while a body is read in order; `used` is what its first products use."""

    used: set[Site] = field(default_factory=set)

    def body(
        self,
        program: Program,
        body: BodyPlan,
        within: tuple[int, ...],
        given: Mapping[Ref, _Origin],
    ) -> _Origin | None:
        """Reads a body, or a call in it, up to the first product of a product.

        Returns:
          What its results depend on; None if that product is in it.
        """
        known = dict(given)
        for step in body.steps:
            origin = _Origin.of_all(known.get(ref, _Origin()) for ref in reads(step))
            if isinstance(step, Reshard):
                if step.gathers_state:
                    site = within, step.result
                    origin = replace(origin, gathers=origin.gathers | {site})
                known[step.result] = origin
                continue
            node = program.nodes[step.node]
            if node.is_call:
                called, calls = node.bodies[0], (*within, step.node)
                given_there = given_to(called, step, known)
                inner = self.body(called, step.bodies[0], calls, given_there)
                if inner is None:
                    return None
                origin = _Origin.of_all((origin, inner))
            elif _multiplies(node):
                if origin.depends_on_product:
                    return None
                self.used |= origin.gathers
                # One without a weight, such as a norm's, is none to hide gathers.
                leaves = any(program.leaf(ref.value) for ref in reads(step))
                origin = _Origin(depends_on_product=leaves or bool(origin.gathers))
            known.update(dict.fromkeys(map(Ref, node.outputs), origin))
            known.update(dict.fromkeys(step.exports, origin))
        made = (*(ref for ref in body.outputs if ref is not None), *body.exports)
        return _Origin.of_all(known[ref] for ref in made if ref in known)


def _multiplies(node: Node) -> bool:
    """Whether there is a matrix product or a convolution in a node."""
    if node.kind == "op" and flops_of(node.eqn):
        return True
    return any(_multiplies(inner) for body in node.bodies for inner in body.nodes)
