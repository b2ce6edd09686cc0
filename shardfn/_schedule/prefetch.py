"""Gathers the weights of scanned layers some iterations before they are used.

In: a plan whose scans gather what they scan over. Out: the plan, in which these gathers
and the casts in front of them run ahead of the rest of the body: the loop carries the
coming layers' gathered weights, so that they cross the wire while a layer computes. So
do activations that the step's own code copies from the host: they cross its link.
"auto" takes the first weights ahead in loops that gather in turn (`order_gathers`), and
in others between hosts that compute for longer than they send (`balanced_loops`).
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shardfn._core.control import Control
from shardfn._core.memories import HOST, space_of
from shardfn._core.option_values import AUTO, FIRST, Prefetch
from shardfn._core.plan import Ahead, Apply, BodyPlan, Ref, Reshard, Step, reads
from shardfn._core.program import Node, Program, aval_of
from shardfn._core.reasons import Note, noted
from shardfn._core.regions import span
from shardfn._core.sharding import Axes
from shardfn._schedule.balanced_loops import computes_for_longer
from shardfn._schedule.bodies import given_to, literals_of
from shardfn._schedule.first_gathers import mark_first_gathers
from shardfn._schedule.order_gathers import gathers_ahead
from shardfn._schedule.versions import fresh

AUTO_IN_TURN = Note(
    "prefetch",
    "gathered ahead, as of loops that gather in turn is what comes before the largest "
    "weights, and what is small (limits.CHAINED_BYTES; prefetch='auto')",
)
AUTO_FIRST = Note(
    "prefetch",
    "gathered ahead for the first products, as the loop computes for longer than it "
    "sends (limits.SUMS_FLOPS) between hosts (prefetch='auto')",
)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is asked of the gathers of one loop.

    Attributes:
      control: what is asked of each leaf.
      axes: the mesh axes.
      on_host: the leaves that live on the host.
      of_itself: why "auto" takes the loop's first weights ahead; None if it does not.
      with_bits: whether it takes those that move quantized, too.
    """

    control: Control
    axes: Axes
    on_host: frozenset[str]
    of_itself: Note | None = None
    with_bits: bool = False

    def of(self, program: Program, step: Reshard) -> Prefetch:
        """What is asked of a move; 0 of one that gathers nothing of the state."""
        if not step.gathers_state:
            return 0
        names = program.leaf(step.source.value)
        asked = self.control.of(*names).prefetch
        if asked != AUTO:
            return asked
        may_run = self.with_bits or not any(step.written)
        is_free = self.on_host.isdisjoint(names) and may_run
        return FIRST if self.of_itself and is_free else 0

    def lead(self, program: Program, step: Reshard) -> int:
        """How many iterations ahead a move runs, if that can be; 0 in its own."""
        asked = self.of(program, step)
        return int(step.used_first) if asked == FIRST else int(asked)

    def note(self, program: Program, step: Reshard) -> Note:
        """Why a move runs ahead."""
        asked = self.control.of(*program.leaf(step.source.value)).prefetch
        if asked == AUTO and self.of_itself:
            return self.of_itself
        return Note("prefetch", f"gathered ahead, as prefetch={asked!r} asks")

    def left(self, program: Program, step: Reshard) -> Note:
        """Why a move does not run ahead where the first ones do."""
        asked = self.control.of(*program.leaf(step.source.value)).prefetch
        text = "gathered in its own iteration, whose first products do not use it"
        return Note("prefetch", f"{text} (prefetch={asked!r})")


def prefetch(
    program: Program, body: BodyPlan, control: Control, axes: Axes
) -> BodyPlan:
    """Takes gathers of scanned weights ahead, in every scan of a plan.

    Args:
      program: the program.
      body: its scheduled plan.
      control: how many iterations ahead each leaf is gathered.
      axes: the mesh axes.

    Returns:
      The plan.
    """
    on_host = (program.leaf(program.inputs[i]) for i in body.on_host)
    names = frozenset(itertools.chain.from_iterable(on_host))
    return _in_scans(program, body, _Asked(control, axes, names))


def _in_scans(program: Program, body: BodyPlan, asked: _Asked) -> BodyPlan:
    steps: list[Step] = []
    for step in body.steps:
        if isinstance(step, Apply) and step.bodies:
            node = program.nodes[step.node]
            inner = zip(node.bodies, step.bodies, strict=True)
            bodies = tuple(_in_scans(p, plan, asked) for p, plan in inner)
            step = replace(step, bodies=bodies)
            if node.kind == "scan" and not node.is_unrolled:
                (region,), arguments = node.regions, node.bodies[0].inputs
                scanned = span(arguments, region.slices)
                constants = span(arguments, region.constants)
                sliced = [*map(Ref, scanned), *step.bodies[0].imports]
                given = {Ref(v): False for v in constants} | dict.fromkeys(sliced, True)
                here = replace(
                    asked,
                    of_itself=_of_itself(node, step, asked.axes),
                    with_bits=computes_for_longer(node, step, asked.axes),
                )
                step = _scan(node.bodies[0], step, given, here)
        steps.append(step)
    return replace(body, steps=tuple(steps))


def _of_itself(node: Node, loop: Apply, axes: Axes) -> Note | None:
    """Why "auto" takes the first weights of a loop ahead; None if it does not."""
    if gathers_ahead(node, loop, axes):
        return AUTO_IN_TURN
    return AUTO_FIRST if computes_for_longer(node, loop, axes) else None


def _scan(
    program: Program, step: Apply, given: Mapping[Ref, bool], asked: _Asked
) -> Apply:
    in_turn = asked.of_itself is AUTO_IN_TURN
    body = mark_first_gathers(program, step.bodies[0], in_turn)
    body, ahead = _explained(program, body, asked), []
    for lead in sorted(_leads(program, body, asked)):
        part, body = _Part(program, body, asked, lead).take(given)
        if part.exports:
            part = replace(part, imports=step.bodies[0].imports)
            ahead.append(Ahead(min(lead, (step.times or 1) - 1), part))
    return replace(step, bodies=(body,), ahead=tuple(ahead))


def _comes_from_host(program: Program, node: Node) -> bool:
    """Whether an operation copies from the host's memory to the device's."""
    given = (aval_of(program, atom) for atom in node.inputs)
    made = (program.avals[value] for value in node.outputs)
    before, after = (
        {getattr(aval, "memory_space", None) for aval in avals}
        for avals in (given, made)
    )
    return space_of(HOST) in before - after


def _explained(program: Program, body: BodyPlan, asked: _Asked) -> BodyPlan:
    """A body whose gathers say why they are left where the first ones run ahead."""
    steps: list[Step] = []
    for step in body.steps:
        if isinstance(step, Reshard):
            if asked.of(program, step) == FIRST and not step.used_first:
                note = asked.left(program, step)
                step = replace(step, notes=noted(step, note))
        elif (node := program.nodes[step.node]).kind == "remat":
            inner = _explained(node.bodies[0], step.bodies[0], asked)
            step = replace(step, bodies=(inner,))
        steps.append(step)
    return replace(body, steps=tuple(steps))


def _leads(program: Program, body: BodyPlan, asked: _Asked) -> set[int]:
    """How many iterations ahead the gathers of a body are asked to run, if any."""
    found: set[int] = set()
    for step in body.steps:
        if isinstance(step, Reshard):
            found.add(asked.lead(program, step))
        elif (node := program.nodes[step.node]).kind == "remat":
            found |= _leads(node.bodies[0], step.bodies[0], asked)
    return found - {0}


@dataclass(slots=True)
class _Part:
    """One body while the gathers that run `lead` iterations ahead are taken out."""

    program: Program
    body: BodyPlan
    asked: _Asked
    lead: int
    ahead: list[Step] = field(default_factory=list)
    rest: list[Step] = field(default_factory=list)
    exports: list[Ref] = field(default_factory=list)

    def take(self, given: Mapping[Ref, bool]) -> tuple[BodyPlan, BodyPlan]:
        """The part that runs ahead, from `given` alone, and the rest, which imports
        what that exports. What is given says whether iterations differ in it: what is
        the same in all of them is not gathered ahead, as a compiler that sees it would
        gather it once, in front of the loop, and hold it from there on."""
        known = {Ref(v): False for v, _ in self.program.constants} | dict(given)
        for step in self.body.steps:
            if isinstance(step, Reshard):
                self.move(step, known)
            else:
                self.apply(step, known)
        rest = replace(
            self.body,
            steps=tuple(self.rest),
            imports=(*self.body.imports, *self.exports),
        )
        part = BodyPlan(
            (), self.needed(), (), (), self.body.imports, tuple(self.exports)
        )
        return part, rest

    def move(self, step: Reshard, known: dict[Ref, bool]) -> None:
        is_asked = self.asked.lead(self.program, step) == self.lead
        is_known = all(ref in known for ref in reads(step))
        differs = known.get(step.source, False)
        if is_asked and differs and is_known:
            note = self.asked.note(self.program, step)
            self.ahead.append(replace(step, notes=noted(step, note)))
            self.exports.append(step.result)
        else:
            self.rest.append(step)

    def apply(self, step: Apply, known: dict[Ref, bool]) -> None:
        node = self.program.nodes[step.node]
        is_known = all(ref in known for ref in reads(step))
        if node.kind == "op" and not node.eqn.effects and is_known:
            self.ahead.append(step)
            differs = any(known[ref] for ref in reads(step))
            made = dict.fromkeys(map(Ref, node.outputs), differs)
            known.update(made)
            if differs and _comes_from_host(self.program, node):
                self.exports.extend(made)
                return
        elif node.kind == "remat":
            step = self.remat(step, node.bodies[0], known)
        self.rest.append(step)

    def remat(self, step: Apply, program: Program, known: dict[Ref, bool]) -> Apply:
        """A remat that imports what its body gathered, if that can run ahead."""
        inner = _Part(program, step.bodies[0], self.asked, self.lead)
        same = dict.fromkeys(literals_of(program, step), False)
        part, rest = inner.take(same | given_to(program, step, known))
        if not part.exports:
            return step
        made = []
        for _ in part.exports:
            whole = replace(self.body, imports=(*self.body.imports, *self.exports))
            made.append(fresh(whole, self.program.nodes[step.node].outputs[0]))
            self.exports.append(made[-1])
        self.ahead.append(replace(step, bodies=(part,), exports=tuple(made)))
        return replace(step, bodies=(rest,), imports=(*step.imports, *made))

    def needed(self) -> tuple[Step, ...]:
        """The steps that what is handed out depends on."""
        needed, kept = set(self.exports), []
        for step in reversed(self.ahead):
            if isinstance(step, Reshard):
                made = {step.result}
            else:
                outputs = self.program.nodes[step.node].outputs
                made = {*map(Ref, outputs), *step.exports}
            if made & needed:
                kept.append(step)
                needed.update(reads(step))
        return tuple(reversed(kept))
