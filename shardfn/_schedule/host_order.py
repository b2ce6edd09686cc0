"""The order of a plan's steps once copies between the memories stand among them.

In: units of steps, each with what it reads and makes. Out: the steps, none before what
it reads is there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardfn._core.plan import HostStep, Ref, Step, Transfer


@dataclass(frozen=True, slots=True)
class Unit:
    """Steps that stay next to each other, what they read from elsewhere, and make."""

    steps: tuple[Step | HostStep, ...]
    reads: frozenset[Ref]
    makes: frozenset[Ref]

    def then(self, other: "Unit") -> "Unit":
        """Both, one after the other, behind the copies from the host that they need:
        moves that run as one follow each other."""
        steps = sorted((*self.steps, *other.steps), key=_follows_copies)
        makes = self.makes | other.makes
        return Unit(tuple(steps), self.reads | (other.reads - self.makes), makes)


def _follows_copies(step: Step | HostStep) -> bool:
    return not isinstance(step, Transfer)


def in_order(units: Sequence[Unit], known: set[Ref]) -> Iterator[Step | HostStep]:
    """The steps, each unit where it stands or, if it needs what a later one makes,
    behind that."""
    waiting: list[Unit] = []
    for unit in units:
        waiting.append(unit)
        while ready := next((each for each in waiting if each.reads <= known), None):
            waiting.remove(ready)
            known |= ready.makes
            yield from ready.steps
    assert not waiting, f"steps that wait for each other: {waiting}"
