"""What a choice is made from: a program as planned so far, and how to plan others.

In: nothing. Out: `Replanning`, which every choice that changes a program is given.
"""

from collections.abc import Callable
from dataclasses import dataclass

from shardfn._core.program import Program
from shardfn._core.sharding import Axes
from shardfn._lowering.sent_bytes import Made


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
