"""What plans say of residuals that quantized sums leave.

In: a planned step. Out: a line that says what they take, and a warning of those that
stay zero.
"""

from collections.abc import Iterator

from shardfn._core.errors import ResidualWarning, called, listed, warn, where
from shardfn._core.plan import BodyPlan
from shardfn._core.program import Program
from shardfn._core.sharding import Axes
from shardfn._lowering.planned_program import Planned
from shardfn._schedule.feed_back import feedbacks
from shardfn.analysis._text import size_text


def residual_notes(program: Program, body: BodyPlan, axes: Axes) -> Iterator[str]:
    """A line for each mesh axis over which residuals are fed back."""
    fed = [each for each in feedbacks(program, body, axes) if each.is_used]
    for over in dict.fromkeys(each.over for each in fed):
        alike = [each for each in fed if each.over == over]
        names = listed([name for each in alike for name in each.leaf])
        size = size_text(sum(each.size for each in alike))
        yield f"error feedback over {over}: {size} of residuals a device, of {names}"


def warn_of_unused(planned: Planned) -> None:
    """Warns of residuals that take memory and stay zero."""
    fed = feedbacks(planned.program, planned.body, planned.axes)
    unused = [each for each in fed if not each.is_used]
    if not unused:
        return
    first, names = unused[0], [name for each in unused for name in each.leaf]
    size = sum(each.size for each in unused)
    warn(
        f"error_feedback has nothing to feed back to {listed(names)}: sums over mesh "
        f"axis '{first.over}' are exact, and residuals of {size} bytes a device stay "
        f"zero.\n  at {where(first.node.eqn)}\n{called()}"
        f"Quantize the sums, reduce_dtype={{{first.over!r}: 'int8'}}, or pass None in "
        "place of these residuals.",
        ResidualWarning,
    )
