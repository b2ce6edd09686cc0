"""What a choice is made from: a program as planned so far, and how to plan others.

In: nothing. Out: `Replanning`, which a choice that changes a program is given, and
`ProgramChoice`, which it makes; and which of two plans is the better one.
"""

from collections.abc import Callable
from dataclasses import dataclass

from shardfn._core.errors import listed
from shardfn._core.limits import LOOP_MOST, STATIONARY_BYTES, STATIONARY_SHARE
from shardfn._core.program import Program
from shardfn._core.sent_bytes import Made, Sent, sent
from shardfn._core.sharding import Axes
from shardfn._core.shown_limits import SHOWN_LEAVES
from shardfn._lowering.live_bytes import live_bytes
from shardfn.analysis._text import size_text


@dataclass(frozen=True, slots=True)
class Replanning:
    """A planned program, and what plans others in the same way.

    Attributes:
      program: the program, before any pass of planning changes it.
      made: the program that its passes made of it, and its plan.
      axes: the mesh axes.
      plan: plans another program.
    """

    program: Program
    made: Made
    axes: Axes
    plan: Callable[[Program], Made]


@dataclass(frozen=True, slots=True)
class ProgramChoice:
    """A program that a choice has made, and what it saves.

    Attributes:
      program: the program; None if none is better than the one before.
      places: the user's lines that it is about.
      before: what each device sends per step without it.
      after: what it sends with it; nothing if that was not planned.
    """

    program: Program | None = None
    places: tuple[str, ...] = ()
    before: Sent = Sent()
    after: Sent = Sent()

    @property
    def where(self) -> str:
        """The lines, for people."""
        return listed(self.places, SHOWN_LEAVES)

    @property
    def sizes(self) -> tuple[str, str]:
        """What is sent without it and with it, for people."""
        return size_text(self.before.bytes), size_text(self.after.bytes)


def least_saved(before: Sent) -> float:
    """The bytes that have to be saved of what is sent for more collectives to be worth
    it."""
    return max(STATIONARY_BYTES, STATIONARY_SHARE * before.bytes)


def is_better(one: Made, other: Made, axes: Axes) -> bool:
    """Whether a plan sends less than another, and a device then has at most `LOOP_MOST`
    bytes more at once."""
    if sent(*one, axes).price >= sent(*other, axes).price:
        return False
    return live_bytes(*one, axes) - live_bytes(*other, axes) <= LOOP_MOST
