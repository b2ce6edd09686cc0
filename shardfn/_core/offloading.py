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
class OffloadTrial:
    """A choice that was compiled.

    Attributes:
      host_bytes: those of the leaves on the host, for one device.
      estimate: bytes that the step takes of a device, by the plan.
      compiled: those by the compiler; None where it refused the program.
    """

    host_bytes: int
    estimate: int
    compiled: int | None


@dataclass(frozen=True, slots=True)
class OffloadChoice:
    """What was chosen for one step.

    Attributes:
      asked: "auto" or a size, as the user wrote it.
      bound: bytes that the step may take of each device.
      without: bytes that it takes with all of these leaves in the device's memory, by
        the plan, and `correction` more.
      taken: those that it takes as chosen.
      groups: the leaves, by what they are to the step.
      correction: bytes by which a compiler's figure for another choice was above the
        plan's.
      holes: what the estimates have for the holes of the compiler's heap, as a part of
        what lives in it.
      trials: the choices that a report compiled to find this one, in their order.
    """

    asked: str
    bound: int
    without: int
    taken: int
    groups: tuple[OffloadGroup, ...]
    correction: int = 0
    holes: float = 0
    trials: tuple[OffloadTrial, ...] = ()

    @property
    def estimate(self) -> int:
        """Bytes that the step takes as chosen, by the plan alone."""
        return self.taken - self.correction

    @property
    def host_bytes(self) -> int:
        return sum(group.host_bytes for group in self.groups)

    @property
    def leaves(self) -> frozenset[str]:
        """The leaves that live on the host."""
        return frozenset[str]().union(*(group.on_host for group in self.groups))

    @property
    def options(self) -> dict[str, str]:
        """The same as a value of `offload`, for other steps on this state."""
        return {glob.escape(name): HOST for name in sorted(self.leaves)}

    @property
    def compiled(self) -> int | None:
        """Bytes that the step takes as chosen, by the compiler, if it was compiled."""
        mine = self.host_bytes, self.estimate
        found = (t.compiled for t in self.trials if (t.host_bytes, t.estimate) == mine)
        return next(found, None)

    @property
    def fits(self) -> bool:
        return (self.compiled or self.taken) <= self.bound

    def role(self, leaf: str) -> str | None:
        """What a leaf is to the step; None if it was not asked for it."""
        return next((g.role for g in self.groups if leaf in g.leaves), None)
