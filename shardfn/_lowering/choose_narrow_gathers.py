"""Gathers what a weight is made of, where that is narrower than the weight.

In: a program and its plan, and a function that plans. Out: the program in which values
that are stored in few bits are gathered as they are, and made into weights on every
device: elements and scales of int8, NF4 or float8; and thin factors of a matrix. What
is cast to fewer bits is cast before it is gathered, as by default.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shardfn._core.constraint import replicate
from shardfn._core.equation_flops import flops_of
from shardfn._core.errors import where
from shardfn._core.limits import LOOP_LIVE, NARROW_SHARE, REPEATED_FLOPS
from shardfn._core.phases import UPDATE
from shardfn._core.plan import Apply, BodyPlan, Reshard, Step
from shardfn._core.program import Node, Program
from shardfn._core.sent_bytes import Made, sent
from shardfn._core.sharding import Sharding, Split
from shardfn._core.sizes import nbytes
from shardfn._lowering.constrained_values import BodyPath, with_operands
from shardfn._lowering.leaf_uses import parts_ahead
from shardfn._lowering.live_bytes import live_bytes
from shardfn._lowering.replanning import ProgramChoice, Replanning


@dataclass(frozen=True, slots=True)
class NarrowChoice(ProgramChoice):
    """What was found of weights that are made of narrower values: the program in which
    these are gathered, and the user's lines that make the weights."""

    @property
    def notes(self) -> tuple[str, ...]:
        """The plan's line about them."""
        if self.program is None:
            return ()
        before, after = self.sizes
        return (
            "gathered before it becomes a weight, which takes at least "
            f"{NARROW_SHARE:.0%} more bytes (limits.NARROW_SHARE): "
            f"{self.where}: {after} sent per step instead of "
            f"{before}",
        )


@dataclass(frozen=True, slots=True)
class _Cut:
    """The least bytes that a value can be made of on every device.

    Attributes:
      size: the bytes.
      values: what has to be gathered.
      nodes: the first results of the nodes that make the value of that.
      flops: what these compute on every device.
    """

    size: int = 0
    values: frozenset[int] = frozenset()
    nodes: frozenset[int] = frozenset()
    flops: int = 0

    def is_worth(self, size: int) -> bool:
        """Whether it is better than to gather so many bytes."""
        return self.flops <= (size - self.size) * REPEATED_FLOPS


def choose_narrow_gathers(now: Replanning) -> tuple[Made, NarrowChoice]:
    """The plan with narrow values gathered, if that is worth it.

    Args:
      now: the program and its plan so far.

    Returns:
      The plan, and what was found.
    """
    program, made, axes, plan = now.program, now.made, now.axes, now.plan
    changed, places = program, dict[str, None]()
    for body, cut, place in _found(*made, ()):
        changed = with_operands(changed, body, cut.values, cut.nodes, replicate)
        places[place] = None
    if not places:
        return made, NarrowChoice()
    tried = plan(changed)
    before, after = sent(*made, axes), sent(*tried, axes)
    # Weights that are made on every device may wait there for a backward pass.
    more = live_bytes(*tried, axes) - live_bytes(*made, axes)
    if after.price >= before.price or more > LOOP_LIVE:
        return made, NarrowChoice()
    return tried, NarrowChoice(changed, tuple(places), before, after)


def _found(
    program: Program, plan: BodyPlan, path: BodyPath, ahead: Sequence[BodyPlan] = ()
) -> Iterator[tuple[BodyPath, _Cut, str]]:
    """The narrower cuts of all that is gathered, the body they are in, and where in the
    user's code the gathered value is made; `ahead` are parts of the body that run in
    earlier iterations."""
    first = [step for part in ahead for step in part.steps]
    moves = (step for step in first if isinstance(step, Reshard))
    cuts = _Cuts(program, (*first, *plan.steps), plan.inputs)
    for step in (*moves, *plan.steps):
        if isinstance(step, Apply):
            node, parts = program.nodes[step.node], parts_ahead(step, ahead)
            for k, bodies in enumerate(zip(node.bodies, step.bodies, strict=True)):
                yield from _found(*bodies, (*path, *node.outputs[:1], k), parts)
        elif step.gathers_state and step.source.value in cuts.makers:
            cut = cuts.of(step.source.value)
            own = nbytes(program.avals[step.source.value])
            if cut.nodes and cut.size <= (1 - NARROW_SHARE) * own:
                node = program.nodes[cuts.makers[step.source.value].node]
                if node.during.phase != UPDATE:
                    yield path, cut, where(node.eqn)


@dataclass(slots=True)
class _Cuts:
    """The least cuts of the values of one body.

    Attributes:
      program: the body.
      steps: those of its plan.
      inputs: the shardings of its arguments.
      makers: by value, the operation that makes it.
      env: by value, its sharding as it is made.
      known: by value, its cut.
      next: the values whose cuts are not known yet.
    """

    program: Program
    steps: Sequence[Step]
    inputs: Sequence[Sharding]
    makers: dict[int, Apply] = field(init=False)
    env: dict[int, Sharding] = field(init=False)
    known: dict[int, _Cut] = field(default_factory=dict)
    next: Iterator[int] = field(init=False)

    def __post_init__(self) -> None:
        self.makers = {
            value: step
            for step in self.steps
            if isinstance(step, Apply)
            for value in self.program.nodes[step.node].outputs
        }
        self.next = iter(self.makers)
        self.env = dict(zip(self.program.inputs, self.inputs, strict=True))
        for step in self.makers.values():
            made = self.program.nodes[step.node].outputs, step.result_shardings
            self.env.update(zip(*made, strict=True))

    def of(self, value: int) -> _Cut:
        """The least cut of a value that is stored in parts; of equal ones that which is
        nearest to the leaves, as they may be made into other values, too."""
        if value not in self.makers:
            return self.own(value)
        while value not in self.known:  # in order: what it is made of comes first
            self.find(next(self.next))
        return self.known[value]

    def own(self, value: int) -> _Cut:
        """That of the value itself."""
        return _Cut(nbytes(self.program.avals[value]), frozenset({value}))

    def find(self, value: int) -> None:
        """Finds the least cut of a value, those of its operands being known."""
        own, made_of = self.own(value), self.made_of(value)
        better = made_of is not None and made_of.is_worth(own.size)
        self.known[value] = made_of if made_of and better else own

    def made_of(self, value: int) -> _Cut | None:
        """The least cut of what an operation makes a value of; None if it should run on
        parts, or takes what is no part of the state."""
        step = self.makers.get(value)
        if step is None:
            return None
        node = self.program.nodes[step.node]
        if not _runs_anywhere(node, step):
            return None
        values, nodes = set[int](), {node.outputs[0]: step.node}
        for atom in {atom for atom in node.inputs if isinstance(atom, int)}:
            sharding = self.env.get(atom, ())
            if not any(isinstance(state, Split) for state in sharding):
                if flops_of(node.eqn):
                    return None  # a product with what is no weight
                continue
            if not all(s.stored for s in sharding if isinstance(s, Split)):
                return None
            cut = self.of(atom)
            values |= cut.values
            nodes |= {n: self.makers[n].node for n in cut.nodes}
        size = sum(nbytes(self.program.avals[value]) for value in values)
        flops = sum(self.flops(at) for at in nodes.values())
        return _Cut(size, frozenset(values), frozenset(nodes), flops)

    def flops(self, at: int) -> int:
        """What a node computes if it runs whole."""
        return sum(flops_of(self.program.nodes[at].eqn).values())


def _runs_anywhere(node: Node, step: Apply) -> bool:
    """Whether an operation can as well run whole on every device: it sums nothing up
    over devices."""
    if node.kind != "op" or node.rule is None or node.eqn.effects:
        return False
    return not any(node.rule.reducer(factor) for factor, _ in step.parts)
