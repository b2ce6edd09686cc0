"""How blocks of a dimension become blocks of each of its runs, such as microbatches.

In: how many runs, and how many devices. Out: which part of its block each device sends
to which device, and by which collective.

A unit is what one device is to hold of one run. Each device has `runs` of them, one
after another, and unit `u` of all goes to device `u % devices`. So every device sends
as many units to every other, but for `runs % devices` that are left: these go by one
permute each, or by an all-to-all that is padded with units that nobody needs.
"""

import math
from collections import Counter
from dataclasses import dataclass

from shardfn._core.limits import REGROUP_PERMUTES


@dataclass(frozen=True, slots=True)
class Regrouping:
    """From blocks to blocks of `runs` equal runs, over so many devices."""

    runs: int
    devices: int

    @property
    def permutes(self) -> int:
        """How many units of each device go by permutes."""
        left = self.runs % self.devices
        padded = self.devices - 1  # units that padding sends in place of those left
        stays = left == 1  # on the device that has it
        return left if stays or left < padded and left <= REGROUP_PERMUTES else 0

    @property
    def exchanged(self) -> int:
        """Units that each two devices exchange by the all-to-all, padding included."""
        return -(-(self.runs - self.permutes) // self.devices)

    def turn(self, device: int) -> int:
        """In which order a device sends what goes by permutes: devices that would send
        to the same ones at the same time differ."""
        return device // (self.devices // math.gcd(self.permutes, self.devices))

    def sent(self, device: int, permute: int) -> int:
        """Which of its units a device sends by a permute."""
        last = self.exchanged * self.devices
        return last + (permute + self.turn(device)) % self.permutes

    def pairs(self, permute: int) -> tuple[tuple[int, int], ...]:
        """Who sends to whom by a permute."""
        return tuple(
            (d, (d * self.runs + self.sent(d, permute)) % self.devices)
            for d in range(self.devices)
        )

    def cycles(self) -> Counter[int]:
        """How many permutes there are by the most devices of a cycle of theirs."""
        return Counter(
            longest
            for permute in range(self.permutes)
            if (longest := _longest_cycle(dict(self.pairs(permute)))) > 1
        )


def _longest_cycle(to: dict[int, int]) -> int:
    longest = 0
    while to:
        start, length = next(iter(to)), 0
        while start in to:
            start, length = to.pop(start), length + 1
        longest = max(longest, length)
    return longest
