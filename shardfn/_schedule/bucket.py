"""Moves small values together: one collective instead of many.

In: a scheduled plan, and up to how many bytes move together, asked of leaves and given
of what meets stationary ones. Out: the plan, in which moves of the same kind stand next
to each other and name the first of them. Gathers come where the first of them stood,
other moves where the last stood: none waits for longer.
"""

from dataclasses import dataclass, field, replace

from shardfn._core.control import Control
from shardfn._core.plan import Apply, BodyPlan, Ref, Reshard, Step, reads
from shardfn._core.program import Program
from shardfn._core.reasons import Note, noted
from shardfn._schedule.bucket_kinds import BucketKind, bytes_of, has_stationary, kind_of


def bucket(program: Program, body: BodyPlan, control: Control) -> BodyPlan:
    """Joins small moves of a plan, and of the plans in it.

    Args:
      program: the program.
      body: its plan, scheduled otherwise.
      control: up to how many bytes each leaf moves together with others.

    Returns:
      The plan.
    """
    stays = has_stationary(body)
    if not stays and not any(control.asked("bucket_bytes")):
        return body
    buckets = _Buckets(program, control, stays)
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


@dataclass(slots=True)
class _Bucket:
    """Moves that are one collective.

    Attributes:
      kind: what they have in common.
      at: index of the step whose place they take.
      members: their indices.
      bytes: of their values.
      before: indices of what makes their sources, each with the place in front of which
        it came when its move joined: where the bucket takes a later one, it stays, as
        others may read it by then.
      behind: the same of what is made of their results.
      holds: all of `members` and `behind`.
      is_needed: whether they cannot take a later place.
    """

    kind: BucketKind
    at: int
    members: list[int] = field(default_factory=list)
    bytes: int = 0
    before: list[tuple[int, int]] = field(default_factory=list)
    behind: list[int] = field(default_factory=list)
    holds: set[int] = field(default_factory=set)
    is_needed: bool = False

    def join(self, index: int, bytes_: int) -> None:
        """One more move."""
        self.members.append(index)
        self.holds.add(index)
        self.bytes += bytes_

    def follow(self, index: int) -> None:
        """One more step that is made of a result."""
        self.behind.append(index)
        self.holds.add(index)


@dataclass(slots=True)
class _Buckets:
    """State while one body's steps get their new order.

    `made` says in the place of which step a version is made, in the order so far; what
    is not in it is there from the start. `makers` are the steps that make it. `stays`
    says whether the body has stationary leaves.
    """

    program: Program
    control: Control
    stays: bool
    steps: list[Step] = field(default_factory=list)
    made: dict[Ref, int] = field(default_factory=dict)
    makers: dict[Ref, int] = field(default_factory=dict)
    buckets: list[_Bucket] = field(default_factory=list)
    open: dict[BucketKind, _Bucket] = field(default_factory=dict)

    def add(self, step: Step) -> None:
        index = len(self.steps)
        self.steps.append(step)
        for ref in self.results(index):
            self.made[ref] = self.makers[ref] = index
        self.use(step, index)
        if isinstance(step, Apply):
            return
        leaf = self.program.leaf(step.source.value)
        kind = kind_of(step, leaf, self.control, self.stays)
        if kind is not None and not self.join(kind, step, index):
            self.open[kind] = _Bucket(kind, at=index)
            self.open[kind].join(index, bytes_of(step))
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
            if kind.early and not kind.is_small:
                continue
            if makers.isdisjoint(bucket_.holds):
                continue
            if self.is_unary(step) or (kind.is_small and self.is_elementwise(step)):
                bucket_.follow(index)
            elif kind.early:
                bucket_.is_needed = True
            else:
                del self.open[kind]

    def is_unary(self, step: Step) -> bool:
        """Whether a step makes something of one value, as a cast does."""
        if isinstance(step, Reshard) or len(reads(step)) != 1:
            return False
        node = self.program.nodes[step.node]
        return node.kind == "op" and not node.eqn.effects

    def is_elementwise(self, step: Step) -> bool:
        """Whether a step goes element by element."""
        if isinstance(step, Reshard):
            return False
        node = self.program.nodes[step.node]
        rule = node.rule
        return rule is not None and rule.flat and not rule.reduce

    def join(self, kind: BucketKind, step: Reshard, index: int) -> bool:
        """Lets a move join the open bucket of its kind, if it may."""
        into = self.open.get(kind)
        if into is None or into.bytes + bytes_of(step) > kind.most:
            return False
        chain = self.chain(step.source, into.at) if kind.early else None
        if chain is not None:
            into.before += [(i, into.at) for i in chain]
            self.made.update((r, into.at - 1) for i in chain for r in self.results(i))
        elif kind.waits or into.is_needed or (kind.early and not kind.is_small):
            return False
        else:
            into.at = index
        into.join(index, bytes_of(step))
        moved = into.members if chain is not None else (*into.members, *into.behind)
        for i in moved:
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
            order |= {i: min(order[i], (first, 0, i)) for i, first in found.before}
            order.update((i, (at, 1, i)) for i in found.members)
            order.update((i, max(order[i], (at, 2, i))) for i in found.behind)
            first = steps[found.members[0]]
            assert isinstance(first, Reshard)
            for i in found.members:
                step, note = steps[i], Note("bucket", found.kind.why, (found.bytes,))
                assert isinstance(step, Reshard)
                notes = noted(step, note)
                steps[i] = replace(
                    step, together=first.result, after=first.after, notes=notes
                )
        return tuple(steps[i] for i in sorted(order, key=order.__getitem__))
