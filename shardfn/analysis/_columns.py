"""The columns of a plan's table, and of what a compiled program made of it.

In: lines of a plan, or what was found for them. Out: rows of cells, equal lines merged.
A column is one entry of `COLUMNS`: the plan, its verification and the page show it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from shardfn.analysis._hlo import HloCollective
from shardfn.analysis._line_check import (
    MERGED,
    MISSING,
    ONCE,
    SHARED,
    UNDECIDED,
    LineCheck,
)
from shardfn.analysis._text import join_columns, shape_text, size_text, subject
from shardfn.analysis.collective import Collective

Lines = Sequence[Collective]
Checks = Sequence[LineCheck]


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Attributes:
      name: its header.
      planned: the cell of equal lines of a plan; None if only programs have one.
      checked: that of the same lines with what was found for them; None for the
        planned one.
      is_key: whether lines that differ in it have rows of their own.
      is_number: whether cells are aligned to the right.
    """

    name: str
    planned: Callable[[Lines], str] | None
    checked: Callable[[Checks], str] | None = None
    is_key: bool = False
    is_number: bool = False

    def of_checks(self, checks: Checks) -> str:
        """The cell of lines with what was found for them."""
        if self.checked is not None:
            return self.checked(checks)
        assert self.planned is not None
        return self.planned([c.line for c in checks])


def plan_table(lines: Lines) -> str:
    """A plan as text: rows of equal lines are merged, their times and bytes added."""
    columns = [c for c in COLUMNS if c.planned is not None]
    rows = [
        [c.planned(group) for c in columns if c.planned is not None]
        for group in _merged(lines, _key)
    ]
    return _text(columns, rows)


def checked_table(checks: Checks) -> str:
    """The same with what a compiled program made of it."""
    return _text(COLUMNS, checked_rows(checks))


def checked_rows(checks: Checks) -> list[list[str]]:
    """The cells of that table; its header is the columns' names."""
    groups = _merged(checks, lambda check: (check.status, *_key(check.line)))
    return [[column.of_checks(group) for column in COLUMNS] for group in groups]


def _key(line: Collective) -> tuple[str, ...]:
    return tuple(c.planned([line]) for c in COLUMNS if c.is_key and c.planned)


def _merged(items: Sequence, key: Callable) -> list[list]:
    groups: dict[object, list] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def _text(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> str:
    right = {i for i, column in enumerate(columns) if column.is_number}
    return join_columns([column.name for column in columns], rows, right)


def _times(lines: Lines) -> str:
    each = sum(line.each for line in lines)
    if all(line.times is not None for line in lines):
        return str(each)
    return "loop" if each == len(lines) == 1 else f"{each} a loop"


def _runs(checks: Checks) -> str:
    planned, runs = _times([c.line for c in checks]), sum(c.runs for c in checks)
    is_less = checks[0].status in (MERGED, SHARED, ONCE, UNDECIDED, MISSING)
    return f"{runs} of {planned}" if is_less else planned


def _overlapped(checks: Checks) -> str:
    sent = sum(c.wire_bytes for c in checks)
    return f"{sum(c.overlapped_bytes for c in checks) / sent:.0%}" if sent else ""


def _found(checks: Checks) -> list[HloCollective]:
    return [c for check in checks for c in check.found]


def _dtype(line: Collective) -> str:
    """`bfloat16`, or `int8/128` where so many elements share a scale."""
    return f"{line.dtype}/{line.block}" if line.block else line.dtype


def _found_dtypes(checks: Checks) -> set[str]:
    """The dtypes in a program; bytes are what quantized values are there."""
    line, found = checks[0].line, {c.dtype for c in _found(checks)}
    return found - {"int8", "uint8"} if line.block else found


def _sent(lines: Lines) -> str:
    """The bytes that are sent, and how many of them are scales."""
    sent = size_text(sum(line.total_bytes for line in lines))
    scales = sum(line.scale_bytes * line.each for line in lines)
    return f"{sent}, scales {size_text(scales)}" if scales else sent


def _change(planned: str, found: Iterable[str]) -> str:
    """`float32`, or `bfloat16->float32,float64` where the program has others."""
    others = ",".join(sorted(set(found) - {planned}))
    return f"{planned}->{others}" if others else planned


COLUMNS = (
    Column("status", None, lambda checks: checks[0].status),
    Column("phase", lambda lines: lines[0].phase, is_key=True),
    Column(
        "operation",
        lambda lines: lines[0].op,
        lambda checks: _change(checks[0].line.op, {c.op for c in _found(checks)}),
        is_key=True,
    ),
    Column("axis", lambda lines: lines[0].axis, is_key=True),
    Column("shape", lambda lines: shape_text(lines[0].shape), is_key=True),
    Column(
        "dtype",
        lambda lines: _dtype(lines[0]),
        lambda checks: _change(_dtype(checks[0].line), _found_dtypes(checks)),
        is_key=True,
    ),
    Column("times", _times, _runs, is_number=True),
    Column(
        "wire",
        lambda lines: _sent(lines),
        lambda checks: size_text(sum(c.wire_bytes for c in checks)),
        is_number=True,
    ),
    Column("overlapped", None, _overlapped, is_number=True),
    Column("for", lambda lines: subject(lines[0]), is_key=True),
)
"""All columns, in order."""
