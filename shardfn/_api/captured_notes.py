"""What plans say of arrays that a step captures, such as weights it is closed over.

In: a program and its plan. Out: a line if they take more of each device than all that
the step is given.
"""

from collections.abc import Iterator

from shardfn._core.plan import BodyPlan
from shardfn._core.program import Program
from shardfn._core.sharding import Axes
from shardfn._core.sizes import local_bytes
from shardfn._schedule.peak_bytes import captured_bytes
from shardfn.analysis._text import size_text


def captured_notes(program: Program, body: BodyPlan, axes: Axes) -> Iterator[str]:
    """The line that says what captured arrays take."""
    inputs = zip(program.inputs, body.inputs, strict=True)
    given = sum(local_bytes(program.avals[v], s, axes) for v, s in inputs)
    captured = captured_bytes(program)
    if axes.devices > 1 and captured > given:
        yield (
            f"arrays that the step captures are whole on every device: "
            f"{size_text(captured)}, more than its arguments take, {size_text(given)}. "
            "Pass frozen weights as an argument: they are stored like state"
        )
