"""A mesh with replicas, where most of what moves between hosts is latency.

In: what a step takes on a target. Out: a row of `Advice` that names the mesh. Tuning
does not compile it: the mesh is the caller's.
"""

from collections.abc import Iterator, Sequence

from shardfn._core.device_coords import slices_of
from shardfn._core.tuning_limits import REPLICAS_LATENCY
from shardfn.analysis._figures import Figures
from shardfn.analysis._text import size_text
from shardfn.analysis.advice import Advice

REPLICA = "replica"


def replica_rows(
    figures: Figures, devices: Sequence[object], memory: int
) -> Iterator[Advice]:
    """The fewest hosts that hold the state, the others being replicas of these.

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
        takes = figures.stored_bytes * (every // group - 1)
        if takes <= free:
            option = (("axis", (REPLICA, *axes.names)),)
            why = (
                f"{share:.0%} of transfers are latency, most of it between "
                f"{slices} hosts; each device stores {size_text(takes)} more. Tuning "
                "keeps the mesh, so compile it with step.on"
            )
            saves, mesh = figures.exposed_seconds, (every // group, group)
            yield Advice("replicas", option, saves, takes, why, mesh)
            return


def _groups(devices: int, host: int) -> Iterator[int]:
    """Devices of one host, of two, four and so on, but not all."""
    group = host
    while group < devices:
        if devices % group == 0:
            yield group
        group *= 2
