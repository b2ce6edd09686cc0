"""Why one move is in a plan: which rule, option, pass or threshold decided it.

In: a move's step, with its cause and the notes of passes. Out: a few lines of text.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from shardfn._core.errors import where
from shardfn._core.leaves import Names
from shardfn._core.moves import Move
from shardfn._core.plan import Reshard
from shardfn._core.reasons import OPERAND, OUTPUT, Cause, Note
from shardfn._core.sharding import Axes, Split, Unreduced
from shardfn.analysis._text import size_text


@dataclass(frozen=True, slots=True, eq=False)
class Why:
    """Why one move is in a plan.

    Attributes:
      names: the leaves that the value belongs to.
      step: the move's step, with its cause and the notes of passes.
      move: the move.
      axes: the mesh axes.
    """

    names: Names
    step: Reshard
    move: Move
    axes: Axes

    @property
    def axis(self) -> str:
        return self.axes.named(self.move.over)

    @property
    def so(self) -> str:
        """What follows for the value."""
        return f"so {self.move.outcome}"

    def places(self) -> Iterator[str]:
        """The user's lines that it is for."""
        causes = (self.step.cause, *(note.cause for note in self.step.notes))
        for cause in causes:
            if cause is not None and cause.node is not None:
                yield where(cause.node.eqn)

    def lines(self) -> list[str]:
        """Which rule, option, pass or threshold decided."""
        cause = self.step.cause
        notes = () if cause is None else cause.notes
        return [
            f"{self.because()}",
            *self.threshold(),
            *(note_text(note) for note in (*notes, *self.step.notes)),
        ]

    def threshold(self) -> Iterator[str]:
        """What a threshold of the rule decided of this move."""
        cause = self.step.cause
        rule = None if cause is None or cause.node is None else cause.node.rule
        if cause is None or rule is None or not rule.threshold:
            return
        start, factor = self.move.state, dict(_by_axis(cause)).get(self.move.axis)
        if isinstance(start, Unreduced):
            decides = factor is not None and rule.reducer(factor) is not None
        elif isinstance(start, Split) and cause.side == OPERAND and start.dim >= 0:
            stuck = rule.whole.intersection(rule.operands[cause.index][start.dim])
            decides = cause.index == 0 and bool(stuck)
        else:
            decides = False
        if decides:
            yield f"propagate: {rule.threshold}"

    def because(self) -> str:
        """What it is for."""
        cause = self.step.cause
        if cause is None:
            return "the plan was written by hand"
        if cause.node is None:
            return self.returned()
        node = cause.node
        prefix, primitive = "propagate: ", node.eqn.primitive.name
        if node.rule is None or node.kind != "op":
            return f"{prefix}{self.without_rule(cause)}"
        rule = f"{primitive} `{node.rule}`"
        if cause.side == OPERAND:
            return f"{prefix}{rule}: {self.taken(cause)}"
        return f"{prefix}{rule}: {self.made(cause)}"

    def returned(self) -> str:
        assert self.step.cause is not None and self.step.cause.side == OUTPUT
        what = f"the result {self.step.cause.index} is returned {self.goal}"
        return f"propagate: {what}, {self.so}"

    def without_rule(self, cause: Cause) -> str:
        """A control-flow node, or an op that has no rule."""
        assert cause.node is not None
        node, primitive = cause.node, cause.node.eqn.primitive.name
        if node.kind == "op":
            why = f"{primitive} has no op sharding rule and runs on whole operands"
            return f"{why}, {self.so}"
        if cause.side == OPERAND:
            return f"the {node.kind} takes it {self.goal}, {self.so}"
        return f"the {node.kind} leaves it {self.start}, {self.so}"

    def taken(self, cause: Cause) -> str:
        """An operand of an op with a rule."""
        assert cause.node is not None and cause.node.rule is not None
        rule, factor = cause.node.rule, dict(_by_axis(cause)).get(self.move.axis)
        so = self.so
        if factor is None:
            if isinstance(self.move.goal, Unreduced):
                return f"the other operands are terms of a sum over {self.axis}, {so}"
            return f"{self.axis} splits no factor of it, {so}"
        has = any(factor in dim for dim in rule.operands[cause.index])
        whose = "the batch's rows" if self.splits_batch(cause) else "as the state lies"
        how = f"this operand is taken {self.goal}" if has else f"it has no {factor}"
        return f"{self.axis} splits {factor}, {whose}; {how}, {so}"

    def made(self, cause: Cause) -> str:
        """A result of an op with a rule."""
        factor, so = (
            dict(_by_axis(cause)).get(self.move.axis),
            self.so,
        )
        if not isinstance(self.move.state, Unreduced):
            return f"its consumers take it {self.goal}, {so}"
        if factor is None:
            return (
                f"its operands are terms over {self.axis}, and it is {self.goal}, {so}"
            )
        takes = f"its consumers take it {self.goal}"
        return f"{self.axis} splits {factor}, which it reduces; {takes}, {so}"

    def splits_batch(self, cause: Cause) -> bool:
        """Whether some operand is split along the axis as the batch is."""
        states = (sharding[self.move.axis] for sharding in cause.operands)
        return any(isinstance(s, Split) and not s.stored for s in states)

    @property
    def goal(self) -> str:
        return _state_text(self.move.goal, self.axis)

    @property
    def start(self) -> str:
        return _state_text(self.move.state, self.axis)


def _by_axis(cause: Cause) -> Iterator[tuple[int, str]]:
    return ((axis, factor) for factor, axis in cause.parts)


def _state_text(state: object, axis: str) -> str:
    if isinstance(state, Unreduced):
        return f"as terms of a {state.op} over {axis}"
    if isinstance(state, Split):
        if state.dim < 0:
            return f"split over {axis} flattened"
        return f"split over {axis} along dimension {state.dim}"
    return "whole"


def note_text(note: Note) -> str:
    """What a pass did, with its name."""
    text = note.text.format(*map(size_text, note.sizes))
    if note.cause is None or note.cause.node is None:
        return f"{note.by}: {text}"
    eqn = note.cause.node.eqn
    return f"{note.by}: also for {eqn.primitive.name} at {where(eqn)}: {text}"
