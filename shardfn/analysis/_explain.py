"""Why a leaf of the state, or a value of the step, moves or stays.

In: the lines of a plan, each with what its moves are for, and how the state is stored.
Out: text, a few lines for each leaf or line of the user's that a pattern names.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from shardfn._core.control import advice, matches
from shardfn._core.errors import ShardingError, call_site, where
from shardfn._core.leaves import Names
from shardfn._core.limits import SHOWN_NAMES
from shardfn._core.moves import Move
from shardfn._core.plan import Reshard
from shardfn._core.program import Node
from shardfn._core.reasons import OPERAND, OUTPUT, Cause, Note
from shardfn._core.sharding import Axes, Split, Unreduced
from shardfn.analysis._text import shape_text, size_text
from shardfn.analysis.collective import Collective

CONSEQUENCES = {
    "all_gather": "so it is gathered",
    "psum_scatter": "so its terms are reduce-scattered",
    "all_reduce": "so its terms are all-reduced",
    "all_to_all": "so it is exchanged",
    "ppermute": "so it is passed on",
}
"""What follows for a value, by the collective that moves it."""


Operation = tuple[Node, tuple[tuple[str, int], ...]]
"""What a plan runs, and `(factor, mesh axis index)` for every factor that is split."""


@dataclass(frozen=True, slots=True)
class LeafLayout:
    """How one leaf of the state is stored.

    Attributes:
      name: its path.
      shape: its global shape.
      dtype: its dtype.
      stored: over which mesh axes it is split, and along which dimensions.
      why: what decided that.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    stored: str
    why: str

    def __str__(self) -> str:
        what = f"{self.name}: {self.dtype} {shape_text(self.shape)}"
        return f"{what}, {self.stored}\n  {self.why}"


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
        return self.axes.names[self.move.axis]

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
            *(_note_text(note) for note in (*notes, *self.step.notes)),
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
        return f"propagate: {what}, {CONSEQUENCES[self.move.op]}"

    def without_rule(self, cause: Cause) -> str:
        """A control-flow node, or an op that has no rule."""
        assert cause.node is not None
        node, primitive = cause.node, cause.node.eqn.primitive.name
        if node.kind == "op":
            why = f"{primitive} has no op sharding rule and runs on whole operands"
            return f"{why}, {CONSEQUENCES[self.move.op]}"
        if cause.side == OPERAND:
            return f"the {node.kind} takes it {self.goal}, {CONSEQUENCES[self.move.op]}"
        return f"the {node.kind} leaves it {self.start}, {CONSEQUENCES[self.move.op]}"

    def taken(self, cause: Cause) -> str:
        """An operand of an op with a rule."""
        assert cause.node is not None and cause.node.rule is not None
        rule, factor = cause.node.rule, dict(_by_axis(cause)).get(self.move.axis)
        so = CONSEQUENCES[self.move.op]
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
            CONSEQUENCES[self.move.op],
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


def _note_text(note: Note) -> str:
    text = note.text.format(*map(size_text, note.sizes))
    if note.cause is None or note.cause.node is None:
        return f"{note.by}: {text}"
    eqn = note.cause.node.eqn
    return f"{note.by}: also for {eqn.primitive.name} at {where(eqn)}: {text}"


def explain(
    pattern: str,
    leaves: Sequence[LeafLayout],
    collectives: Sequence[Collective],
    operations: Sequence[Operation],
    axes: Axes,
) -> str:
    """What a plan says of the leaves, or of the user's line, that `pattern` names."""
    found = [leaf for leaf in leaves if matches(leaf.name, pattern)]
    blocks = [_leaf_text(leaf, collectives) for leaf in found]
    if not blocks:
        lines = [line for line in collectives if _is_at(line, pattern)]
        blocks = [_line_text(line) for line in lines]
    if not blocks:
        blocks = list(_staying(pattern, operations, axes))
    if not blocks:
        _refuse(pattern, leaves, collectives, operations)
    return "\n\n".join(blocks)


def _staying(
    pattern: str, operations: Sequence[Operation], axes: Axes
) -> Iterator[str]:
    """What runs on the line that a pattern names, where nothing moves for it."""
    found: dict[str, dict[str, None]] = {}
    for node, parts in operations:
        if node.rule is not None and _names(pattern, place := where(node.eqn)):
            splits = (f"{axes.names[axis]} splits {factor}" for factor, axis in parts)
            text = ", ".join(splits) or "every device runs it on whole operands"
            text = f"  {node.eqn.primitive.name} `{node.rule}`: {text}"
            found.setdefault(place, {})[text] = None
    for place, texts in found.items():
        moves = "nothing moves: its operands lie as it takes them"
        yield "\n".join([f"{place}: {moves}", *texts])


def _leaf_text(leaf: LeafLayout, collectives: Sequence[Collective]) -> str:
    moves = [
        line for line in collectives if any(leaf.name in w.names for w in line.why)
    ]
    if not moves:
        stays = "nothing moves it: every operation takes it as it is stored"
        return f"{leaf}\n  {stays}"
    return "\n".join([str(leaf), *(_indented(_line_text(m, leaf.name)) for m in moves)])


def _line_text(line: Collective, leaf: str = "") -> str:
    times = "in a while loop" if line.times is None else f"{line.times} x"
    often = "" if line.times == 1 else f" {times}"
    text = (
        f"{line.phase} {line.op} over {line.axis}:{often} {shape_text(line.shape)} "
        f"{line.dtype}, {size_text(line.total_bytes)} sent, at {line.place}"
    )
    if not leaf and line.path:
        text += f", for {line.path}"
    whys = [w for w in line.why if not leaf or leaf in w.names] or line.why
    reasons = dict.fromkeys(text for why in whys for text in why.lines())
    return "\n".join([text, *(f"  {reason}" for reason in reasons)])


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.split("\n"))


def _is_at(line: Collective, pattern: str) -> bool:
    places = (line.place, *(place for why in line.why for place in why.places()))
    return any(_names(pattern, place) for place in places)


def _nearest(file: str, line: int, operations: Sequence[Operation]) -> list[str]:
    """The lines of a file that are nearest to one of it and have operations, in
    order."""
    places = {where(node.eqn).split(" ")[0] for node, _ in operations}
    split = (place.rpartition(":") for place in places)
    lines = {int(n) for name, _, n in split if name == file and n.isdigit()}
    near = sorted(lines, key=lambda n: abs(n - line))[:SHOWN_NAMES]
    return [f"{file}:{n}" for n in sorted(near)]


def _names(pattern: str, place: str) -> bool:
    """Whether `train.py:12`, or `train.py`, names a place such as
    `train.py:12 (loss_fn)`."""
    return place == pattern or place.startswith((f"{pattern} ", f"{pattern}:"))


def _refuse(
    pattern: str,
    leaves: Sequence[LeafLayout],
    collectives: Sequence[Collective],
    operations: Sequence[Operation],
) -> NoReturn:
    file, _, number = pattern.partition(" ")[0].rpartition(":")
    if number.isdigit() and (near := _nearest(file, int(number), operations)):
        raise ShardingError(
            f"no operation of the step is at {pattern}.\n"
            f"  explain was called at {call_site()}\n"
            f"The nearest are at {', '.join(near)}. A call over several lines has "
            "the number of one of them."
        )
    lines = dict.fromkeys(line.place.split(" ")[0] for line in collectives)
    at = f" Collectives are at {', '.join(lines)}." if lines else ""
    raise ShardingError(
        f"the plan has no leaf and no collective that '{pattern}' names.\n"
        f"  explain was called at {call_site()}\n"
        f"{advice(pattern, [leaf.name for leaf in leaves])}{at}"
    )
