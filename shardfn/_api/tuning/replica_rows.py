"""A mesh with replicas, where most of what transfers take is latency.

In: what a step takes on a target. Out: a row of `Advice` that names the mesh. Tuning
does not compile it: the mesh is the caller's.
"""

from collections.abc import Iterator, Sequence

from shardfn._core.device_coords import slices_of
from shardfn._core.tuning_limits import REPLICAS_LATENCY, REPLICAS_STATE
from shardfn.analysis._figures import Figures
from shardfn.analysis._text import size_text
from shardfn.analysis.advice import Advice


def replica_rows(
    figures: Figures, devices: Sequence[object], memory: int
) -> Iterator[Advice]:
    """The fewest slices, each of what NVLink connects, that hold the state; the others
    are replicas of these.

    Args:
      figures: of the step, its state split over one axis of all devices.
      devices: the target's.
      memory: bytes that the step may take on each of them.
    """
    axes, slices, every = figures.plan.axes, slices_of(devices), len(devices)
    share = figures.timeline.latency / max(figures.transfer_seconds, 1e-12)
    if slices < 2 or axes.sizes != (every,) or share < REPLICAS_LATENCY:
        return
    free = memory - figures.memory.peak
    for group in _groups(every, every // slices):
        more = figures.stored_bytes * (every // group - 1)
        takes = REPLICAS_STATE * more
        if takes <= free:
            option = (("axis", (_unused(axes.names), *axes.names)),)
            why = (
                f"{share:.0%} of what transfers take is latency, on {slices} slices; "
                f"each device stores {size_text(more)} more. Tuning keeps the mesh, so "
                "compile it with step.on"
            )
            saves, mesh = figures.exposed_seconds, (every // group, group)
            yield Advice("replicas", option, saves, takes, why, mesh)
            return


def _unused(names: Sequence[str]) -> str:
    """A name for the axis of the replicas."""
    return next(n for n in ("replica", "replicas") if n not in names)


def _groups(devices: int, slice_size: int) -> Iterator[int]:
    """Devices of one slice, of two, four and so on, but not all."""
    group = slice_size
    while group < devices:
        if devices % group == 0:
            yield group
        group *= 2
