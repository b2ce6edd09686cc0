"""Why a value moves: what it is moved for, and which passes changed that.

In: a node of the program and what was decided for it. Out: `Cause` and `Note`, frozen
values that moves carry. Their text is made when somebody asks for it.
"""

from dataclasses import dataclass
from typing import Any

from shardfn._core.program import Node
from shardfn._core.sharding import Sharding

OPERAND, RESULT, OUTPUT = "operand", "result", "output"


@dataclass(frozen=True, slots=True, eq=False)
class Cause:
    """What a value is moved for.

    Attributes:
      side: OPERAND of a node, which takes it otherwise; RESULT of one, which must not
        stay as it is made; or OUTPUT of a program.
      index: which operand, result or output.
      node: the node; None for an output.
      parts: `(factor, mesh axis index)` for every factor of the node that is split.
      operands: shardings that the node takes.
      notes: the thresholds that decided how the node is split.
    """

    side: str
    index: int
    node: Node | None = None
    parts: tuple[tuple[str, int], ...] = ()
    operands: tuple[Sharding, ...] = ()
    notes: "tuple[Note, ...]" = ()


@dataclass(frozen=True, slots=True, eq=False)
class Note:
    """What a pass, an option or a threshold did to a move.

    Attributes:
      by: the pass.
      text: what it did and why; `{}` stands for each of `sizes`.
      sizes: in bytes.
      cause: what the text is about, if that is another operation than the move's own.
    """

    by: str
    text: str
    sizes: tuple[Any, ...] = ()
    cause: Cause | None = None


def noted(move: Any, *notes: Note) -> tuple[Note, ...]:
    """The notes of a move and these, of which the last replaces one that it repeats."""
    known = move.notes
    for note in notes:
        same = known and (known[-1].by, known[-1].text) == (note.by, note.text)
        known = (*known[:-1], note) if same else (*known, note)
    return known
