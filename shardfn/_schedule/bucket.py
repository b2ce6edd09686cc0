"""Moves small leaves of the state together: one collective instead of many.

In: a scheduled plan, and up to how many bytes move together. Out: the plan, in which
moves of the same kind stand next to each other and name the first of them. Gathers come
where the first of them stood, other moves where the last stood: none waits for longer.
"""

import math
from dataclasses import dataclass, field, replace

from shardfn._core.control import Control
from shardfn._core.moves import moves_of
from shardfn._core.phases import Pass
from shardfn._core.plan import Apply, BodyPlan, Ref, Reshard, Step, reads
from shardfn._core.program import Program
from shardfn._core.reasons import Note, noted
from shardfn._core.sharding import AxisSharding, Split, Unreduced


def bucket(program: Program, body: BodyPlan, control: Control) -> BodyPlan:
    """Joins small moves of a plan, and of the plans in it.

    Args:
      program: the program.
      body: its plan, scheduled otherwise.
      control: up to how many bytes each leaf moves together with others.

    Returns:
      The plan.
    """
    if not any(control.asked("bucket_bytes")):
        return body
    buckets = _Buckets(program, control)
    for step in body.steps:
        if isinstance(step, Apply) and step.bodies:
            inner = program.nodes[step.node].bodies
            bodies = zip(inner, step.bodies, strict=True)
            step = replace(
                step,
                bodies=tuple(bucket(p, plan, control) for p, plan in bodies),
                ahead=tuple(
                    replace(a, part=bucket(inner[0], a.part, control))
                    for a in step.ahead
                ),
            )
        buckets.add(step)
    return replace(body, steps=buckets.ordered())


JOINED = "one of the moves of {} that are one collective, as bucket_bytes asks"


@dataclass(frozen=True, slots=True)
class _Kind:
    """What the moves of one bucket have in common.

    Attributes:
      early: they gather stored values, which are there from the start.
      states: of every sharding on their paths, what it is along each mesh axis.
      dtype: on the wire.
      during: the pass that they are part of.
      waits: they are tied to an activation.
      most: bytes that move together.
    """

    early: bool
    states: tuple[tuple[str, ...], ...]
    dtype: str
    during: Pass
    waits: bool
    most: int


@dataclass(slots=True)
class _Bucket:
    """Moves that are one collective.

    Attributes:
      members: their indices.
      bytes: of their values.
      at: index of the step whose place they take.
      before: indices of what makes their sources, and goes with them.
      behind: the same of what is made of their results.
    """

    members: list[int]
    bytes: int
    at: int
    before: list[int] = field(default_factory=list)
    behind: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Buckets:
    """State while one body's steps get their new order.

    `made` says in the place of which step a version is made, in the order so far; what
    is not in it is there from the start. `makers` are the steps that make it.
    """

    program: Program
    control: Control
    steps: list[Step] = field(default_factory=list)
    made: dict[Ref, int] = field(default_factory=dict)
    makers: dict[Ref, int] = field(default_factory=dict)
    buckets: list[_Bucket] = field(default_factory=list)
    open: dict[_Kind, _Bucket] = field(default_factory=dict)

    def add(self, step: Step) -> None:
        index = len(self.steps)
        self.steps.append(step)
        for ref in self.results(index):
            self.made[ref] = self.makers[ref] = index
        self.use(step, index)
        if isinstance(step, Apply):
            return
        kind = self.kind(step)
        if kind is not None and not self.join(kind, step, index):
            self.open[kind] = _Bucket([index], _bytes(step), index)
            self.buckets.append(self.open[kind])

    def results(self, index: int) -> tuple[Ref, ...]:
        """The versions that a step makes."""
        step = self.steps[index]
        if isinstance(step, Reshard):
            return (step.result,)
        return (*map(Ref, self.program.nodes[step.node].outputs), *step.exports)

    def use(self, step: Step, index: int) -> None:
        """Nothing more joins moves whose results are needed here, unless what needs
        them can wait too."""
        makers = {self.makers[ref] for ref in reads(step) if ref in self.makers}
        for kind, bucket_ in list(self.open.items()):
            if kind.early or makers.isdisjoint((*bucket_.members, *bucket_.behind)):
                continue
            if self.is_unary(step):
                bucket_.behind.append(index)
            else:
                del self.open[kind]

    def is_unary(self, step: Step) -> bool:
        """Whether a step makes something of one value, as a cast does."""
        if isinstance(step, Reshard) or len(reads(step)) != 1:
            return False
        node = self.program.nodes[step.node]
        return node.kind == "op" and not node.eqn.effects

    def kind(self, step: Reshard) -> _Kind | None:
        """The kind of a move; None if it goes alone."""
        leaf = self.program.leaf(step.source.value)
        most = self.control.of(*leaf).bucket_bytes
        if not leaf or step.auto or step.dtype.startswith("key<"):
            return None
        sent = [move for move in moves_of(step.path) if move.communicates]
        joins = all(move.joins for move in sent)
        sums = all(s.op == "sum" for s in step.path[0] if isinstance(s, Unreduced))
        if not sent or not joins or not sums or _bytes(step) > most:
            return None
        return _Kind(
            early=step.gathers_state,
            states=tuple(tuple(map(_state, sharding)) for sharding in step.path),
            dtype=step.dtype,
            during=step.during,
            waits=step.after is not None,
            most=most,
        )

    def join(self, kind: _Kind, step: Reshard, index: int) -> bool:
        """Lets a move join the open bucket of its kind, if it may."""
        into = self.open.get(kind)
        if into is None or into.bytes + _bytes(step) > kind.most:
            return False
        if kind.early:
            chain = self.chain(step.source, into.at)
            if chain is None:
                return False
            into.before += chain
            self.made.update((r, into.at - 1) for i in chain for r in self.results(i))
        elif kind.waits:
            return False
        else:
            into.at = index
        into.members.append(index)
        into.bytes += _bytes(step)
        for i in (*into.members, *into.behind):
            self.made.update((ref, into.at) for ref in self.results(i))
        return True

    def chain(self, ref: Ref, at: int) -> list[int] | None:
        """The unary steps that make a version of what is there in front of step `at`,
        as casts of a stored value do. None if it takes more."""
        steps: list[int] = []
        while self.made.get(ref, -1) >= at:
            step = self.steps[self.makers[ref]]
            if not self.is_unary(step):
                return None
            steps.append(self.makers[ref])
            (ref,) = reads(step)
        return steps

    def ordered(self) -> tuple[Step, ...]:
        """The steps in their new order."""
        steps, order = list(self.steps), {i: (i, 1, i) for i in range(len(self.steps))}
        for found in self.buckets:
            if len(found.members) == 1:
                continue
            at = found.at
            order.update((i, (at, 0, i)) for i in found.before)
            order.update((i, (at, 1, i)) for i in found.members)
            order.update((i, max(order[i], (at, 2, i))) for i in found.behind)
            first = steps[found.members[0]]
            assert isinstance(first, Reshard)
            for i in found.members:
                step, note = steps[i], Note("bucket", JOINED, (found.bytes,))
                assert isinstance(step, Reshard)
                notes = noted(step, note)
                steps[i] = replace(
                    step, together=first.result, after=first.after, notes=notes
                )
        return tuple(steps[i] for i in sorted(order, key=order.__getitem__))


def _bytes(step: Reshard) -> int:
    return math.prod(step.shape) * step.itemsize


def _state(state: AxisSharding) -> str:
    group = state.group if isinstance(state, Split) else 0
    return f"{type(state).__name__} {group}"
