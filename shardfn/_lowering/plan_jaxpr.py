"""Plans a jaxpr: the one place that puts trace, propagation and schedule together.

In: a jaxpr, the shardings of its arguments and of those results that are given. Out:
its program and its scheduled plan.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardfn._core.control import NOTHING_ASKED, Control
from shardfn._core.garbage import uncollected
from shardfn._core.option_values import Stationary
from shardfn._core.plan import BodyPlan
from shardfn._core.program import Program, aval_of
from shardfn._core.sent_bytes import Made, sent
from shardfn._core.sharding import Axes, Sharding, stored_shape
from shardfn._core.stages import Observer, unobserved
from shardfn._lowering.choose_generated import choose_generated
from shardfn._lowering.choose_lookups import (
    LookupsChoice,
    are_worth,
    with_lookups_exchanged,
)
from shardfn._lowering.choose_loops import LoopsChoice, choose_loops
from shardfn._lowering.choose_narrow_gathers import (
    NarrowChoice,
    choose_narrow_gathers,
)
from shardfn._lowering.choose_owners import choose_owners
from shardfn._lowering.choose_stationary import StationaryChoice, choose_stationary
from shardfn._lowering.leaf_uses import uses_of
from shardfn._lowering.planned_jaxpr import PlannedJaxpr, StepFacts
from shardfn._lowering.replanning import Replanning, is_better
from shardfn._propagation.automatic_axes import split_automatically
from shardfn._propagation.exchange_rows import has_exchanges
from shardfn._propagation.propagate import Known, propagate
from shardfn._propagation.stationary import can_stay, is_padded, stationary
from shardfn._schedule.pipeline import schedule
from shardfn._schedule.widen_reductions import widen
from shardfn._trace.jaxpr_to_program import make_program


@uncollected()
def plan_jaxpr(
    jaxpr: Any,
    inputs: Sequence[Sharding],
    required: Sequence[Sharding | None],
    axes: Axes,
    *,
    small: int = 2,
    control: Control = NOTHING_ASKED,
    facts: StepFacts | None = None,
    observe: Observer = unobserved,
) -> PlannedJaxpr:
    """Plans a function of whole arrays, to be run on one device's blocks.

    Args:
      jaxpr: the function.
      inputs: shardings of its arguments.
      required: shardings that its first results must have, None for any; those after
        them may have any. The first of both are the state's leaves.
      axes: the mesh axes.
      small: elements below which unreduced values are reduced as late as possible.
      control: what is asked of the moves of state leaves.
      facts: of a step, what its arguments and results are. Its results beyond those
        that are the state are then handed to the user, so none of them is padded.
      observe: is given the plan after propagation, and after each schedule pass.

    Returns:
      The program, its plan, and which leaves of the state stay where they are.
    """
    if facts is not None:
        devices = math.prod(axes.sizes[axes.names.index(a)] for a in axes.batch)
        given = facts.arguments, facts.program, devices, axes.platform
        program = make_program(jaxpr, *given)
        program = facts.arrange(program)
    else:
        program = make_program(jaxpr, platform=axes.platform)
    free = [None] * (len(program.outputs) - len(required))
    fixed = [*required, *free]
    planner = Planner(program, inputs, fixed, axes, small, control, facts)
    if facts is None:
        made = planner.plan(frozenset(), observe=observe)
        return PlannedJaxpr(*made, program, StationaryChoice())
    start = planner
    planner, made, choice = start.choose()

    def gathering(program: Program) -> Made:
        return replace(start, program=program).gathering()[1]

    # Each trial finds narrow weights itself: those found so far may be of whole rows.
    generated = choose_generated(Replanning(start.program, made, axes, gathering))
    if generated.program is not None:
        start = replace(start, program=generated.program)
        planner, made, choice = start.choose()

    unexchanged = start.program
    start, (planner, made, choice), lookups = start.with_lookups(planner, made, choice)

    def plan(program: Program) -> Made:
        other = replace(planner, program=program)
        return other.plan(choice.all, choice.whole)

    now = Replanning(planner.program, made, axes, plan)
    made, owners = choose_owners(now)
    if observe is not unobserved:
        planner = replace(planner, program=owners.program or planner.program)
        made = planner.plan(choice.all, choice.whole, observe)
    found = owners, generated, planner.loops, planner.narrow, lookups
    base = made[0] if lookups.program is None else unexchanged
    return PlannedJaxpr(*made, base, choice, *found)


@dataclass(frozen=True, slots=True)
class Planner:
    """Plans one program with some leaves of its state stationary; arguments as of
    `plan_jaxpr`.

    Attributes:
      loops: how much `control` lets loops hold whole, and why.
      narrow: which weights `program` makes of what it gathers, and why.
      known: by program, by `whole` and `exchange` of `propagate`, and by what loops may
        hold, what earlier plans decided: each choice plans the program many times, and
        most of it stays as it was.
    """

    program: Program
    inputs: Sequence[Sharding]
    required: Sequence[Sharding | None]
    axes: Axes
    small: int
    control: Control
    facts: StepFacts | None
    loops: LoopsChoice = LoopsChoice()
    narrow: NarrowChoice = NarrowChoice()
    known: dict[tuple[Program, bool, bool, int], Known] = field(default_factory=dict)

    def choose(self) -> tuple["Planner", Made, StationaryChoice]:
        """The plan that sends least, with leaves that stay; and what plans so."""
        first = self.staying(*self.gathering())
        if first[0].narrow.program is None:
            return first
        other = self.staying(*self.gathering(narrowly=False))  # others may stay
        prices = [sent(*each[1], self.axes).price for each in (other, first)]
        return other if self.asked(True) or prices[0] < prices[1] else first

    def with_lookups(
        self, planner: "Planner", made: Made, choice: StationaryChoice
    ) -> tuple["Planner", tuple["Planner", Made, StationaryChoice], LookupsChoice]:
        """What has chosen a plan, and the choice, or those with rows of tables asked of
        the devices that own them, if that is better."""
        first = planner, made, choice
        lookups = with_lookups_exchanged(self.program, made, self.axes)
        if lookups.program is None:
            return self, first, lookups
        start = replace(self, program=lookups.program)
        other = start.choose()
        if not are_worth(other[1], made, self.axes):
            return self, first, LookupsChoice()
        return start, other, replace(lookups, after=sent(*other[1], self.axes))

    def staying(
        self, planner: "Planner", made: Made
    ) -> tuple["Planner", Made, StationaryChoice]:
        """The same, from one plan that gathers all leaves."""
        asked, may = self.asked(True), self.asked("auto")
        made, choice = choose_stationary(made, asked, may, self.axes, planner.plan)
        return planner, made, replace(choice, unable=self.unable(made, asked))

    def gathering(self, narrowly: bool = True) -> tuple["Planner", Made]:
        """The same of those that gather all leaves: these or what they are made of, in
        loops or in front of them."""
        planner, made, narrow = self, self.plan(frozenset()), NarrowChoice()
        if narrowly:
            now = Replanning(self.program, made, self.axes, self.of)
            made, narrow = choose_narrow_gathers(now)
        if narrow.program is not None:
            planner = replace(self, program=narrow.program, narrow=narrow)
        made, loops = choose_loops(
            made, self.axes, lambda most: planner.holding(most).plan(frozenset())
        )
        return replace(planner.holding(loops.allowed), loops=loops), made

    def holding(self, allowed: int) -> "Planner":
        """The same, where loops may hold so many bytes if these are more than others
        may."""
        return replace(self, control=replace(self.control, loop_bytes=allowed))

    def of(self, program: Program) -> Made:
        """Another program and its plan, with all leaves gathered."""
        return replace(self, program=program).plan(frozenset())

    def unable(self, made: Made, asked: frozenset[str]) -> frozenset[str]:
        """The leaves that are asked to stay, and are stored so that they cannot."""
        padded = {
            name
            for value, sharding in zip(self.program.inputs, self.inputs, strict=True)
            if is_padded(self.program.avals[value], sharding, self.axes)
            for name in asked.intersection(self.program.leaf(value))
        }
        uses = uses_of(*made, self.axes) if padded else ()
        gathered = {name for use in uses for name in padded.intersection(use.leaf)}
        return self.asked(True, able=False) | gathered

    def asked(self, stationary: Stationary, able: bool = True) -> frozenset[str]:
        """The names of the stored leaves of which `stationary` is asked, of those that
        are able to stay, or of the others."""
        return frozenset(
            name
            for value, sharding in zip(self.program.inputs, self.inputs, strict=True)
            if sharding != self.axes.replicated and can_stay(sharding) == able
            for name in self.program.leaf(value)
            if self.control.of(name).stationary == stationary
        )

    def plan(
        self,
        stays: frozenset[str],
        whole: bool = False,
        observe: Observer = unobserved,
    ) -> tuple[Program, BodyPlan]:
        """The program, and its plan with these leaves staying; `whole` as of
        `propagate`. Rows are exchanged if the step sends less so (one gather may be for
        several operations, or in front of a loop), or would hold too much."""
        made, exchange = self.with_exchanges(stays, whole), True
        if has_exchanges(made[1]):
            other = self.with_exchanges(stays, whole, exchange=False)
            if is_better(other, made, self.axes):
                made, exchange = other, False
        asked = stays, whole, exchange
        return made if observe is unobserved else self.with_exchanges(*asked, observe)

    def with_exchanges(
        self,
        stays: frozenset[str],
        whole: bool,
        exchange: bool = True,
        observe: Observer = unobserved,
    ) -> tuple[Program, BodyPlan]:
        """The same, with rows of the batch exchanged or not, where an operation by
        itself sends less so."""
        program, axes, control = self.program, self.axes, self.control
        inputs, required = self.marked(stays)
        kinds = program, whole, exchange, control.loop_bytes
        known = self.known.setdefault(kinds, Known())
        asked = axes, self.small, control, whole, exchange
        body = propagate(program, inputs, required, *asked, known)
        even = required
        if self.facts is not None:
            even = _without_padding(program, body, required, axes)
        wider = widen(program, body, control)
        if wider is not program or even != required:
            known = known if wider is program else None
            program = wider
            body = propagate(program, inputs, even, *asked, known)
        if self.facts is not None:
            body = split_automatically(
                program, body, self.facts.auto_inputs, self.facts.auto_outputs
            )
            on_host, aliased = self.facts.on_host, self.facts.aliased
            body = replace(body, on_host=on_host, to_host=on_host, aliased=aliased)
        observe("propagate", program, body)
        return program, schedule(program, body, control, axes, observe)

    def marked(
        self, stays: frozenset[str]
    ) -> tuple[Sequence[Sharding], Sequence[Sharding | None]]:
        """The shardings of arguments and results, those of these leaves marked."""
        inputs, required = list(self.inputs), list(self.required)
        for i, value in enumerate(self.program.inputs if stays else ()):
            sharding = inputs[i]
            named = not stays.isdisjoint(self.program.leaf(value))
            if named and can_stay(sharding):
                inputs[i] = stationary(sharding)
                if i < len(required) and required[i] == sharding:
                    required[i] = inputs[i]
        return inputs, required


def _without_padding(
    program: Program,
    body: BodyPlan,
    required: Sequence[Sharding | None],
    axes: Axes,
) -> list[Sharding | None]:
    """`required`, and replicated for results that would come padded otherwise."""
    out = list(required)
    for j, atom in enumerate(program.outputs):
        sharding, shape = body.output_shardings[j], aval_of(program, atom).shape
        if out[j] is None and stored_shape(shape, sharding, axes) != tuple(shape):
            out[j] = axes.replicated
    return out
