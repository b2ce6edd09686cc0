"""Why a leaf of the state, or a value of the step, moves or stays.

In: the lines of a plan, each with what its moves are for, and how the state is stored.
Out: text, a few lines for each leaf or line of the user's that a pattern names.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from shardfn._core.errors import ShardingError, call_site, where
from shardfn._core.limits import (
    DUPLICATED_BYTES,
    DUPLICATED_COLUMNS,
    DUPLICATED_READS,
)
from shardfn._core.path_patterns import advice, matches
from shardfn._core.program import Node
from shardfn._core.sharding import Axes
from shardfn._core.shown_limits import SHOWN_NAMES
from shardfn.analysis._text import shape_text, size_text
from shardfn.analysis.collective import Collective
from shardfn.analysis.host_transfer import HostTransfer

Operation = tuple[Node, tuple[tuple[str, int], ...], tuple[str, ...]]
"""What a plan runs, `(factor, mesh axis index)` for every factor that is split, and
what passes did to what it makes."""

DUPLICATED = (
    "each product that reads it makes it: of "
    f"{size_text(DUPLICATED_BYTES)} or more (limits.DUPLICATED_BYTES), multiplied with "
    f"{DUPLICATED_COLUMNS} columns at most (limits.DUPLICATED_COLUMNS), made of "
    f"{DUPLICATED_READS} times its bytes at most (limits.DUPLICATED_READS)"
)


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


def explain(
    pattern: str,
    leaves: Sequence[LeafLayout],
    collectives: Sequence[Collective],
    operations: Sequence[Operation],
    axes: Axes,
    transfers: Sequence[HostTransfer] = (),
) -> str:
    """What a plan says of the leaves, or of the user's line, that `pattern` names."""
    found = [leaf for leaf in leaves if matches(leaf.name, pattern)]
    blocks = [_leaf_text(leaf, collectives, transfers) for leaf in found]
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
    for node, parts, notes in operations:
        if node.rule is not None and _names(pattern, place := where(node.eqn)):
            splits = (f"{axes.names[axis]} splits {factor}" for factor, axis in parts)
            text = ", ".join(splits) or "every device runs it on whole operands"
            text = f"  {node.eqn.primitive.name} `{node.rule}`: {text}"
            text = "; ".join([text, *notes])
            found.setdefault(place, {})[text] = None
    for place, texts in found.items():
        moves = "nothing moves: its operands lie as it takes them"
        yield "\n".join([f"{place}: {moves}", *texts])


def _leaf_text(
    leaf: LeafLayout,
    collectives: Sequence[Collective],
    transfers: Sequence[HostTransfer],
) -> str:
    moves = [
        line for line in collectives if any(leaf.name in w.names for w in line.why)
    ]
    copies = [f"  {t}" for t in transfers if t.path == leaf.name]
    if not moves and copies:
        return "\n".join([str(leaf), *copies])
    if not moves:
        stays = "nothing moves it: every operation takes it as it is stored"
        return f"{leaf}\n  {stays}"
    lines = (_indented(_line_text(m, leaf.name)) for m in moves)
    return "\n".join([str(leaf), *copies, *lines])


def _line_text(line: Collective, leaf: str = "") -> str:
    often = "" if line.each == 1 else f" {line.each} x"
    often += " in each iteration of a while loop:" * (line.times is None)
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
    places = {where(node.eqn).split(" ")[0] for node, *_ in operations}
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
