"""What may look on while a step is planned.

In: the name of each stage, the program, and the plan that the stage made. Out: nothing.
"""

from collections.abc import Callable

from shardfn._core.plan import BodyPlan
from shardfn._core.program import Program

Observer = Callable[[str, Program, BodyPlan], None]
"""Takes the name of each stage, and what it made."""


def unobserved(stage: str, program: Program, body: BodyPlan) -> None:
    """Looks at nothing."""
