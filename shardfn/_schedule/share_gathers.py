"""Which uses of a value share one move, and which move it again.

In: a plan with one move in front of every use. Out: the plan with equal moves merged,
except gathers of stored values that are used again much later: those are repeated, and
tied to a recent value so that the compiler cannot merge them behind the plan's back.
"""

import math
from dataclasses import dataclass, field, replace

from shardfn._core.control import Control
from shardfn._core.limits import KEPT_SHARE
from shardfn._core.phases import Pass
from shardfn._core.plan import Apply, BodyPlan, Ref, Reshard, Step, reading, reads
from shardfn._core.program import Program
from shardfn._core.sharding import Sharding, Split


def share(program: Program, body: BodyPlan, control: Control, unit: bool) -> BodyPlan:
    """Merges equal moves of one body.

    Args:
      program: the body's program.
      body: its plan; plans inside it are left alone.
      control: which gathers to repeat in the backward pass.
      unit: the body is one layer in one pass: what it gathers, it keeps to its end.

    Returns:
      The plan with shared and repeated moves.
    """
    sharing = _Sharing(program, control, unit)
    for step in body.steps:
        sharing.add(step)
    return replace(
        body,
        steps=tuple(sharing.steps),
        outputs=tuple(None if r is None else sharing.name(r) for r in body.outputs),
        exports=tuple(map(sharing.name, body.exports)),
    )


_Move = tuple[Ref, Sharding, str]
"""What is moved, where to, and in which dtype: a narrower one rounds the value."""


@dataclass(frozen=True, slots=True)
class _Made:
    """What a move made, in which pass, and the bytes that had been gathered when it
    was last used."""

    ref: Ref
    during: Pass
    last: int


@dataclass(slots=True)
class _Sharing:
    """State while one body's steps are rewritten.

    `gathered` counts the bytes gathered so far; unless the user said otherwise, a
    gather is repeated if more than its own bytes were gathered since the value's last
    use. `held` counts the bytes that are kept all the same, because the same pass uses
    them again and they are few beside those. `tokens` are results that a repeated
    gather can wait for, the newest last; `fence` is how many of them existed when the
    step before the last gather's was reached, so that a gather may run one step ahead.
    """

    program: Program
    control: Control
    unit: bool
    steps: list[Step] = field(default_factory=list)
    names: dict[Ref, Ref] = field(default_factory=dict)
    made: dict[_Move, _Made] = field(default_factory=dict)
    uses: dict[Ref, _Move] = field(default_factory=dict)
    gathered: int = 0
    held: int = 0
    tokens: list[Ref] = field(default_factory=list)
    fence: int = 0

    def name(self, ref: Ref) -> Ref:
        return self.names.get(ref, ref)

    def add(self, step: Step) -> None:
        if isinstance(step, Apply):
            self.apply(step)
        else:
            self.reshard(step)

    def apply(self, step: Apply) -> None:
        renamed = reading(step, self.name)
        for ref in reads(renamed):
            if ref in self.uses:
                key = self.uses[ref]
                self.made[key] = replace(self.made[key], last=self.gathered)
        self.steps.append(renamed)
        self.gathered += sum(map(gathered_bytes, step.bodies)) * (step.times or 1)
        node = self.program.nodes[step.node]
        for value, sharding in zip(node.outputs, step.result_shardings, strict=True):
            if any(isinstance(s, Split) for s in sharding) and node.backward:
                self.tokens.append(Ref(value))

    def reshard(self, step: Reshard) -> None:
        renamed = reading(step, self.name)
        assert isinstance(renamed, Reshard)
        step = renamed
        key = step.source, step.path[-1], step.dtype
        if key in self.made:
            made = self.made[key]
            if self.shares(step, made):
                self.names[step.result] = made.ref
                self.made[key] = replace(made, last=self.gathered)
                return
            step = replace(step, after=self.token(step))
        elif self.is_again(step):
            step = replace(step, after=self.token(step))
        self.steps.append(step)
        if step.gathers_state:
            self.gathered += math.prod(step.shape) * step.itemsize
            self.fence = len(self.tokens)
        self.made[key] = _Made(step.result, step.during, self.gathered)
        self.uses[step.result] = key

    def shares(self, step: Reshard, made: _Made) -> bool:
        """Whether a move can be left out because an equal one was made before."""
        leaf = self.program.leaf(step.source.value)
        asked = self.control.of(*leaf).reshard_after_forward
        if not step.gathers_state or self.unit or asked is False:
            return True
        if asked is True and step.during != made.during:
            return False
        between, own = self.gathered - made.last, math.prod(step.shape) * step.itemsize
        if between <= own:
            return True
        if asked is True or step.during != made.during:
            return False
        few = self.held + own <= KEPT_SHARE * between
        self.held += own if few else 0
        return few

    def is_again(self, step: Reshard) -> bool:
        """Whether a move gathers what a group of devices kept of an earlier gather."""
        splits = [s for s in step.path[0] if isinstance(s, Split)]
        return not self.unit and any(s.group for s in splits) and step.stored

    def token(self, step: Reshard) -> Ref | None:
        """A value that a repeated gather waits for: the newest that existed when the
        gather before it was made, or else the newest of all."""
        older = self.tokens[: self.fence]
        for candidates in (older, self.tokens):
            if candidates:
                return candidates[-1]
        return self.newest_result()

    def newest_result(self) -> Ref | None:
        for step in reversed(self.steps):
            if isinstance(step, Apply):
                node = self.program.nodes[step.node]
                return Ref(node.outputs[0]) if node.outputs else None
        return None


def gathered_bytes(body: BodyPlan) -> int:
    """Bytes of stored values that a plan gathers, loops counted out."""
    total = 0
    for step in body.steps:
        if isinstance(step, Reshard):
            if step.gathers_state:
                total += math.prod(step.shape) * step.itemsize
        else:
            total += sum(map(gathered_bytes, step.bodies)) * (step.times or 1)
    return total
