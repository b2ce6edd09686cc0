"""What a choice is made from: a program as planned so far, and how to plan others.

In: nothing. Out: `Replanning`, which every choice that changes a program is given; and
which of two plans is the better one.
"""

from collections.abc import Callable
from dataclasses import dataclass

from shardfn._core.limits import LOOP_MOST
from shardfn._core.program import Program
from shardfn._core.sent_bytes import Made, sent
from shardfn._core.sharding import Axes
from shardfn._lowering.live_bytes import live_bytes


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


def is_better(one: Made, other: Made, axes: Axes) -> bool:
    """Whether a plan sends less than another, and a device then has at most `LOOP_MOST`
    bytes more at once."""
    if sent(*one, axes).price >= sent(*other, axes).price:
        return False
    return live_bytes(*one, axes) - live_bytes(*other, axes) <= LOOP_MOST
