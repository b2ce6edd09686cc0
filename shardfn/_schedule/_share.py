"""Which uses of a value share one move, and which move it again.

In: a plan with one move in front of every use. Out: the plan with equal moves merged,
except gathers of stored values that are used again much later: those are repeated, and
tied to a recent value so that the compiler cannot merge them behind the plan's back.
"""

import math
from dataclasses import dataclass, field, replace

from shardfn._plan import Apply, BodyPlan, Ref, Reshard, Step
from shardfn._program import Program
from shardfn._sharding import Axes, Sharding, Split


def share(
    program: Program, body: BodyPlan, axes: Axes, unit: bool, in_loop: bool
) -> BodyPlan:
    """Merges equal moves of one body.

    Args:
      program: the body's program.
      body: its plan; plans inside it are left alone.
      axes: the mesh axes.
      unit: the body is one layer in one pass: what it gathers, it keeps to its end.
      in_loop: the body runs once per iteration of a loop.

    Returns:
      The plan with shared and repeated moves.
    """
    sharing = _Sharing(program, axes, unit, in_loop)
    for step in body.steps:
        sharing.add(step)
    outputs = tuple(sharing.name(r) for r in body.outputs)
    return replace(body, steps=tuple(sharing.steps), outputs=outputs)


@dataclass(slots=True)
class _Sharing:
    """State while one body's steps are rewritten.

    `gathered` counts the bytes gathered so far; a gather is repeated if more than its
    own bytes were gathered since the value's last use. `tokens` are results that a
    repeated gather can wait for, the newest last; `fence` is how many of them existed
    when the step before the last gather's was reached, so that a gather may run one
    step ahead.
    """

    program: Program
    axes: Axes
    unit: bool
    in_loop: bool
    steps: list[Step] = field(default_factory=list)
    names: dict[Ref, Ref] = field(default_factory=dict)
    made: dict[tuple[Ref, Sharding], tuple[Ref, int]] = field(default_factory=dict)
    uses: dict[Ref, tuple[Ref, Sharding]] = field(default_factory=dict)
    gathered: int = 0
    tokens: list[Ref] = field(default_factory=list)
    fence: int = 0

    def name(self, ref: Ref | None) -> Ref | None:
        return None if ref is None else self.names.get(ref, ref)

    def add(self, step: Step) -> None:
        if isinstance(step, Apply):
            self.apply(step)
        else:
            self.reshard(step)

    def apply(self, step: Apply) -> None:
        operands = tuple(map(self.name, step.operands))
        for ref in operands:
            if ref in self.uses:
                key = self.uses[ref]
                self.made[key] = (ref, self.gathered)
        self.steps.append(replace(step, operands=operands))
        self.gathered += sum(map(gathered_bytes, step.bodies)) * (step.times or 1)
        node = self.program.nodes[step.node]
        for value, sharding in zip(node.outputs, step.result_shardings, strict=True):
            if any(isinstance(s, Split) for s in sharding) and node.backward:
                self.tokens.append(Ref(value))

    def reshard(self, step: Reshard) -> None:
        source = self.name(step.source)
        assert source is not None
        step = replace(step, source=source, after=self.name(step.after))
        key = source, step.path[-1]
        size = math.prod(step.shape) * step.itemsize
        if key in self.made:
            ref, then = self.made[key]
            near = self.unit or self.gathered - then <= size
            if near or not step.gathers_state:
                self.names[step.result] = ref
                self.made[key] = (ref, self.gathered)
                return
            step = replace(step, after=self.token(step))
        self.steps.append(step)
        if step.gathers_state:
            self.gathered += size
            self.fence = len(self.tokens)
        self.made[key] = (step.result, self.gathered)
        self.uses[step.result] = key

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
