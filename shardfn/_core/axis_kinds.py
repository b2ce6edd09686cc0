"""What mesh axes are for: a row for each kind of axis.

In: nothing. Out: `AxisKind`, what planning asks of an axis, and the kinds of the axes
that a step is sharded over. `Axes` answers by them; nothing else goes by an axis's
place or name.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AxisKind:
    """What an axis of one kind is for.

    Attributes:
      name: of the kind.
      stores: whether leaves of the state are split over it unless `shard` asks
        otherwise, so that their gradients are reduce-scattered along it. One axis of a
        step does.
      divides: whether parameters may be gathered within groups of neighbours along it.
        One axis of a step does.
      batch: whether rows of the batch are split over it unless `batch_spec` says
        otherwise.
    """

    name: str
    stores: bool
    divides: bool
    batch: bool


DATA = AxisKind("data", stores=True, divides=True, batch=True)
REPLICA = AxisKind("replica", stores=False, divides=False, batch=True)


def default_kinds(count: int) -> tuple[AxisKind, ...]:
    """Of so many axes, major to minor, as in hybrid sharding: parameters are split over
    the last, whose devices are the closest, and repeated over the others."""
    return (REPLICA,) * (count - 1) + (DATA,)
