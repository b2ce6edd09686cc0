"""Which leaves of a state live on the host so that a step fits its devices.

In: what was asked, and what was found of a step. Out: `OffloadChoice`, a value that
says which leaves, in what order, and why.
"""

import glob
from collections.abc import Mapping
from dataclasses import dataclass

from shardfn._core.memories import HOST

MOMENTS, MASTERS, PARAMETERS = "moments", "master weights", "parameters"
ROLES = (MOMENTS, MASTERS, PARAMETERS)
"""What leaves are to a step, in the order in which they leave for the host. What only
the update reads crosses the link once each way; parameters come for every pass."""


@dataclass(frozen=True, slots=True)
class OffloadGroup:
    """Leaves that are the same to a step.

    Attributes:
      role: one of `ROLES`.
      leaves: the bytes that a device stores of each.
      on_host: those that live on the host.
    """

    role: str
    leaves: Mapping[str, int]
    on_host: frozenset[str]

    @property
    def bytes(self) -> int:
        return sum(self.leaves.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.leaves[name] for name in self.on_host)


@dataclass(frozen=True, slots=True)
class OffloadChoice:
    """What was chosen for one step.

    Attributes:
      asked: "auto" or a size, as the user wrote it.
      bound: bytes that the step may take of each device.
      without: bytes that it takes with all of these leaves in the device's memory, by
        the plan.
      taken: those that it takes as chosen.
      groups: the leaves, by what they are to the step.
    """

    asked: str
    bound: int
    without: int
    taken: int
    groups: tuple[OffloadGroup, ...]

    @property
    def leaves(self) -> frozenset[str]:
        """The leaves that live on the host."""
        return frozenset[str]().union(*(group.on_host for group in self.groups))

    @property
    def options(self) -> dict[str, str]:
        """The same as a value of `offload`, for other steps on this state."""
        return {glob.escape(name): HOST for name in sorted(self.leaves)}

    @property
    def fits(self) -> bool:
        return self.taken <= self.bound

    def role(self, leaf: str) -> str | None:
        """What a leaf is to the step; None if it was not asked for it."""
        return next((g.role for g in self.groups if leaf in g.leaves), None)
