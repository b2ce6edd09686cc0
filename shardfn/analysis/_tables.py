"""A plan as a table: one row per kind of collective, then totals.

In: the lines of a plan, its mesh axes and options. Out: text that fits a terminal.
"""

from collections.abc import Sequence

from shardfn._core.control import Control
from shardfn._core.limits import REPLICATED_SHARE
from shardfn._core.sharding import Axes
from shardfn.analysis._columns import plan_table
from shardfn.analysis._replicated import Work
from shardfn.analysis._text import size_text
from shardfn.analysis.collective import Collective

GATHERED = "the gathered parameters in their compute dtype"
NONE_GATHERED = "no parameter is gathered, so bytes are not counted in M"


def table(
    collectives: Sequence[Collective],
    axes: Axes,
    parameter_bytes: int,
    control: Control,
    work: Work,
) -> str:
    """Rows of equal collectives are merged, their times added; then totals."""
    totals = _totals(collectives, axes, parameter_bytes)
    if work.share > REPLICATED_SHARE:
        totals.append(f"  {work}")
    totals += str(control).splitlines()
    return "\n".join([plan_table(collectives), "", *totals])


def _totals(
    collectives: Sequence[Collective], axes: Axes, parameter_bytes: int
) -> list[str]:
    devices = " x ".join(
        f"{n}={s}" for n, s in zip(axes.names, axes.sizes, strict=True)
    )
    total, m = sum(c.total_bytes for c in collectives), parameter_bytes
    lines = [
        f"mesh {devices}",
        f"each device sends {size_text(total)} per step"
        + (f" = {total / m:.2f} M" if m else ""),
        f"M = {size_text(m)}: {GATHERED if m else NONE_GATHERED}",
    ]
    for phase in ("forward", "backward", "update"):
        part = sum(c.total_bytes for c in collectives if c.phase == phase)
        lines.append(f"  {phase:<9}{size_text(part)}")
    fallbacks = [c for c in collectives if c.fallback]
    if fallbacks:
        part = sum(c.total_bytes for c in fallbacks)
        lines.append(f"  of which {size_text(part)} only for want of a rule")
    if any(c.times is None for c in collectives):
        lines.append("  while loops are counted as one iteration")
    return lines
