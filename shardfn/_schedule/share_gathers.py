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
from shardfn._core.plan import Apply, BodyPlan, Ref, Reshard, Step, reads
from shardfn._core.program import Program
from shardfn._core.quantized import Quantized
from shardfn._core.reasons import Note, noted
from shardfn._core.sharding import Sharding, Split
from shardfn._schedule.versions import reading


def share_gathers(
    program: Program, body: BodyPlan, control: Control, unit: bool
) -> BodyPlan:
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


NEAR = "kept: {} gathered in between are no more than its own {}"
FAR = "{} were gathered since its last use, more than its own {}"
FEW = f"{KEPT_SHARE} of what is gathered in between (limits.KEPT_SHARE)"
FEW_KEPT = f"{{}} that are kept are at most {FEW}, {{}}"

_Verdict = tuple[bool, Note | None]
"""Whether a move is left out, and why it is or is not."""

_Move = tuple[Ref, Sharding, str, tuple[Quantized | None, ...]]
"""What is moved, where to, in which dtype and how quantized: both round the value."""


@dataclass(frozen=True, slots=True)
class _Made:
    """What a move made, the index of its step, in which pass, and the bytes that had
    been gathered when it was last used."""

    ref: Ref
    index: int
    during: Pass
    last: int


@dataclass(slots=True)
class _Sharing:
    """State while one body's steps are rewritten.

    `gathered` counts the bytes gathered so far; unless the user said otherwise, a
    gather is repeated if more than its own bytes were gathered since the value's last
    use. `kept_bytes` counts the bytes that are kept all the same, because the same pass
    uses them again and they are few. `tokens` are results that a repeated
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
    kept_bytes: int = 0
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
        key = step.source, step.path[-1], step.dtype, step.written
        if key in self.made:
            made = self.made[key]
            is_shared, why = self.shares(step, made)
            if is_shared:
                self.names[step.result] = made.ref
                self.note(made.index, why)
                self.made[key] = replace(made, last=self.gathered)
                return
            notes = step.notes if why is None else noted(step, why)
            step = replace(step, after=self.token(step), notes=notes)
        elif self.is_repeat(step):
            step = replace(step, after=self.token(step))
        self.steps.append(step)
        if step.gathers_state:
            self.gathered += math.prod(step.shape) * step.itemsize
            self.fence = len(self.tokens)
        index = len(self.steps) - 1
        self.made[key] = _Made(step.result, index, step.during, self.gathered)
        self.uses[step.result] = key

    def shares(self, step: Reshard, made: _Made) -> _Verdict:
        """Whether a move can be left out because an equal one was made before."""
        leaf = self.program.leaf(step.source.value)
        asked = self.control.of(*leaf).reshard_after_forward
        if not step.gathers_state:
            return True, None
        between, own = self.gathered - made.last, math.prod(step.shape) * step.itemsize

        def shared(text: str, *sizes: float) -> _Verdict:
            return True, Note("share_gathers", text, sizes, step.cause)

        def repeated(text: str, *sizes: float) -> _Verdict:
            return False, Note("share_gathers", f"gathered again: {text}", sizes)

        if self.unit:
            return shared("one gather serves its layer and pass")
        if asked is False:
            return shared("reshard_after_forward=False keeps it")
        if asked is True and step.during != made.during:
            return repeated("reshard_after_forward=True")
        if between <= own:
            return shared(NEAR, between, own)
        if asked is True or step.during != made.during:
            return repeated(FAR, between, own)
        total = self.kept_bytes + own
        if total > KEPT_SHARE * between:
            text = f"{FAR}; to keep {{}} would be more than {FEW}"
            return repeated(text, between, own, total)
        self.kept_bytes = total
        return shared(FEW_KEPT, total, between)

    def note(self, index: int, why: Note | None) -> None:
        """Says of a move that another one is left out for it."""
        step = self.steps[index]
        if why is not None and isinstance(step, Reshard):
            self.steps[index] = replace(step, notes=noted(step, why))

    def is_repeat(self, step: Reshard) -> bool:
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
