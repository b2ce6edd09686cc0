"""What a compiled program made of its plan: a frozen value that prints as a table.

In: for every line of a plan, the collectives that the program has for it. Out: which
lines are there as planned, which are not, and what is there that no line asks for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shardfn._core import compat
from shardfn._core.reading_limits import ALL_REDUCED_SHARE
from shardfn.analysis._columns import checked_table
from shardfn.analysis._copied_bytes import CopiedBytes
from shardfn.analysis._hlo import HloCollective, overlapped_bytes, wire_bytes
from shardfn.analysis._line_check import (
    ALL_REDUCED,
    MEANING,
    PRESENT,
    LineCheck as LineCheck,
)
from shardfn.analysis._text import size_text


@dataclass(frozen=True, slots=True)
class Verification:
    """A compiled program held against its plan; see `print(verification)`.

    Attributes:
      lines: every line of the plan, in its order, with what was found for it.
      extra: compiled collectives that no line of the plan asks for.
      automatic: those over other axes of the mesh, which XLA makes and no plan has;
        bytes below are without them.
      platform: what it was compiled for, "" if that is not known.
      on_host: what of the host's memory is not as planned, a line for each.
      copied: bytes that the program copies between the memories, and the plan's; none
        where nothing is planned, or the program does not say how often a loop runs.
      misplaced: parts of stacks that a loop reads or writes elsewhere than the program
        says, a line for each.
    """

    lines: tuple[LineCheck, ...]
    extra: tuple[HloCollective, ...]
    automatic: tuple[HloCollective, ...] = ()
    platform: str = ""
    on_host: tuple[str, ...] = ()
    copied: tuple[CopiedBytes, ...] = ()
    misplaced: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the program sends what the plan says, or less, as far as the backend
        can, and nothing else, has in the host's memory what the plan has there, and its
        loops read and write their own parts of stacks."""
        fits = not self.extra and not self.on_host and not self.misplaced
        return fits and not self.faults

    @property
    def faults(self) -> tuple[LineCheck, ...]:
        """The lines that send more than planned, or are not there; small ones that are
        all-reduced are none: compilers for TPUs choose that for gathers of a few
        kilobytes, such as a norm's scale."""
        wrong = tuple(c for c in self.lines if not c.ok)
        reduced = self.having(ALL_REDUCED)
        sent = sum(c.wire_bytes for c in reduced)
        most = ALL_REDUCED_SHARE * self.planned_bytes
        if sent > most or not compat.all_reduces_little(self.platform):
            return wrong
        return tuple(c for c in wrong if c not in reduced)

    def having(self, *status: str) -> tuple[LineCheck, ...]:
        """The lines with one of these statuses.

        Args:
          *status: see `LineCheck`.

        Returns:
          The lines, in the order of the plan.
        """
        return tuple(c for c in self.lines if c.status in status)

    @property
    def planned_bytes(self) -> int:
        """Bytes that each device sends per step by the plan."""
        return sum(c.line.total_bytes for c in self.lines)

    @property
    def wire_bytes(self) -> int:
        """Bytes that each device sends per step in the compiled program."""
        return sum(c.wire_bytes for c in self.lines) + wire_bytes(self.extra)

    @property
    def overlapped_bytes(self) -> int:
        """The part of them that moves while a matrix product runs, by the schedule."""
        lines = sum(c.overlapped_bytes for c in self.lines)
        return lines + overlapped_bytes(self.extra)

    @property
    def exact(self) -> bool:
        """Whether all trip counts are known; a loop without one counts once."""
        found = [c for check in self.lines for c in (*check.found, *check.scales)]
        return all(c.exact for c in (*found, *self.extra))

    def __str__(self) -> str:
        return "\n".join([checked_table(self.lines), "", *totals_of(self)])

    def problems(self) -> str:
        """The lines that are not as planned and what is extra, as text.

        Returns:
          A table and what its words mean; empty if all is as planned.
        """
        wrong = self.faults
        parts = [checked_table(wrong)] if wrong else []
        parts += [f"extra: {text}" for text in _extra(self.extra)]
        parts += [*self.on_host, *self.misplaced]
        return "\n".join([*parts, *_meanings(wrong)])


def _extra(extra: Sequence[HloCollective]) -> list[str]:
    return [
        f"{c.op}{_by(c)} of {c.elements} {c.dtype} over {c.group_size} devices, "
        f"{c.times} times, {size_text(c.times * c.wire_bytes)}"
        + f", at {c.op_name}"
        * bool(c.op_name)
        for c in extra
    ]


def _by(collective: HloCollective) -> str:
    """What it reduces with, unless that is a sum."""
    return f" ({collective.reduces})" if collective.reduces not in ("", "sum") else ""


def _meanings(wrong: Sequence[LineCheck]) -> list[str]:
    seen = {c.status for c in wrong}
    return [f"{status}: {text}" for status, text in MEANING.items() if status in seen]


def totals_of(checked: Verification) -> list[str]:
    """The verdict, bytes per step, the part that overlaps, and what else there is to
    say, as lines."""
    counts = {s: len(checked.having(s)) for s in (PRESENT, *MEANING)}
    found = ", ".join(f"{n} {s}" for s, n in counts.items() if n) or "no collectives"
    sent, planned = checked.wire_bytes, checked.planned_bytes
    lines = [
        f"{'as planned' if checked.ok else 'NOT as planned'}: {found}"
        + f", {len(checked.extra)} extra",
        f"each device sends {size_text(sent)} per step; planned {size_text(planned)}",
    ]
    if sent:
        share = checked.overlapped_bytes / sent
        lines.append(f"{share:.0%} of it while a matmul runs, by the schedule")
    if checked.automatic:
        automatic = size_text(wire_bytes(checked.automatic))
        lines.append(f"beside it {automatic} over mesh axes that are left to XLA")
    lines += [f"extra: {text}" for text in _extra(checked.extra)]
    lines += map(str, checked.copied)
    lines += (line for line in checked.on_host if line not in lines)
    lines += checked.misplaced
    lines += _meanings(checked.lines)
    if not checked.exact:
        lines.append("loops without a known trip count are taken as the plan has them")
    return lines
