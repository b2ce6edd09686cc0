"""Searches the order of moves: which of them wait, so that memory is taken for less.

In: a plan whose moves are chosen. Out: the plan, in which gradients are summed one
after the other, and what is around loops waits, where less lives at once then. What
lives is that of the plan's own order, and what waits where the plan leaves the order
open. Nothing waits that does not help, so that the compiler is free to overlap; but a
large term of a sum stands in front of a loop or behind it, whichever is better.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from shardfn._core.plan import Apply, BodyPlan, Ref
from shardfn._core.program import Node, Program, mixes_passes
from shardfn._core.sharding import Axes
from shardfn._schedule.backward_liveness import Choice, around_loop, choices, loops
from shardfn._schedule.bodies import inside
from shardfn._schedule.chain_reduce_scatters import (
    can_chain,
    chain_reduce_scatters,
    is_layer,
)
from shardfn._schedule.heap import Heap
from shardfn._schedule.liveness import Liveness
from shardfn._schedule.open_order import open_order


def search_order(program: Program, body: BodyPlan, axes: Axes) -> BodyPlan:
    """Orders the moves of a step's backward pass.

    Args:
      program: the step.
      body: its plan.
      axes: the mesh axes.

    Returns:
      The plan.
    """
    if not mixes_passes(program):
        return body
    body = inside(program, body, lambda p, b: search_order(p, b, axes))
    return _Search(program, body, axes).found()


def _is_backward_loop(node: Node) -> bool:
    """Whether it is a loop over layers that runs backward, not one over microbatches,
    which holds both passes."""
    return node.is_loop and node.backward


@dataclass(slots=True)
class _Search:
    """The search in one body; `within` is what is live in the bodies in it."""

    program: Program
    body: BodyPlan
    axes: Axes
    within: dict[int, int] = field(default_factory=dict)

    def found(self) -> BodyPlan:
        """The plan with every choice that makes less live at once."""
        body = self.body
        if can_chain(self.program, body):
            plain, more = self.live(body)
            most = max(map(sum, zip(plain, more, strict=True)))
            # Sums that wait cannot be one collective: for less memory only.
            if max(plain) < most:
                chained = chain_reduce_scatters(
                    self.program, body, layers_wait=self.axes.lets_sums_wait
                )
                body = chained if self.cost(chained)[0] < most else body
        waited = frozenset[Ref]()
        units = (s for s in body.steps if is_layer(s, self.program))
        first = [step.node for step in itertools.islice(units, 1)]
        for node in (*first, *loops(self.program, body)):
            body, waited = self.around(body, node, waited)
        return body

    def around(
        self, body: BodyPlan, loop: int, waited: frozenset[Ref]
    ) -> tuple[BodyPlan, frozenset[Ref]]:
        """The plan with the best order around a loop, or around the first of unrolled
        layers, and what has been waited for."""

        def ordered(chosen: list[Choice]) -> tuple[BodyPlan, frozenset[Ref]]:
            return around_loop(self.program, body, self.axes, loop, chosen, waited)

        open_choices = choices(self.program, body, self.axes, loop)
        if not open_choices:
            return body, waited
        chosen: list[Choice] = []
        found = ordered(chosen)
        least = self.cost(found[0])
        for choice in open_choices:
            tried = ordered([*chosen, choice])
            cost = self.cost(tried[0])
            if cost < least:
                chosen, found, least = [*chosen, choice], tried, cost
        return found

    def live(self, body: BodyPlan) -> tuple[list[int], list[int]]:
        """The bytes that live at each step, and what waits besides."""
        live = Liveness(
            self.program,
            body,
            self.axes,
            Heap(),
            within=self.within,
        )
        return live.profile(), open_order(live)

    def cost(self, body: BodyPlan) -> tuple[int, int]:
        """The most bytes that live at once, and those that live while layers run."""
        bytes_live = list(map(sum, zip(*self.live(body), strict=True)))
        return max(bytes_live), sum(self.in_layers(body, bytes_live))

    def in_layers(self, body: BodyPlan, bytes_live: list[int]) -> Iterator[int]:
        for step, live in zip(body.steps, bytes_live, strict=False):
            if isinstance(step, Apply):
                loop = _is_backward_loop(self.program.nodes[step.node])
                if loop or is_layer(step, self.program):
                    yield live
