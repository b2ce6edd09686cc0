"""One line of a plan, and what the compiled program has for it.

In: a planned collective, and the collectives found for it. Out: a status with a
meaning, and the bytes that are sent for it.
"""

from dataclasses import dataclass

from shardfn.analysis._hlo import HloCollective, overlapped_bytes, wire_bytes
from shardfn.analysis.collective import Collective

PRESENT = "present"
NARROWED = "narrowed"
WIDENED = "widened"
ALL_REDUCED = "all-reduced"
PROMOTED = "promoted"
REWRITTEN = "rewritten"
MERGED = "merged"
SHARED = "shared"
ONCE = "once"
FOLDED = "folded"
HOISTED = "hoisted"
INVARIANT = "invariant"
UNROLLED = "unrolled"
TILED = "tiled"
UNDECIDED = "undecided"
MISSING = "missing"

FAITHFUL = (
    PRESENT,
    NARROWED,
    PROMOTED,
    SHARED,
    ONCE,
    INVARIANT,
    UNROLLED,
    FOLDED,
    TILED,
)
"""What sends what the plan says, or less, as far as the backend can; and tiles."""

MEANING = {
    NARROWED: "moved in a smaller dtype",
    WIDENED: "moved in a larger dtype",
    PROMOTED: "moved in a larger dtype, as this backend has no collectives of the "
    "planned one; GPUs and TPUs have",
    ALL_REDUCED: "done as an all-reduce: each device sums, or gathers, by twice the "
    "bytes, and keeps its part",
    REWRITTEN: "done by another collective",
    MERGED: "moved once with another line, so the value lives in between",
    SHARED: "moved once with another line, as this backend merges equal collectives, "
    "whatever keeps them apart; GPUs and TPUs do not",
    ONCE: "moved once with another line of the same pass, which computes the same",
    HOISTED: "gathered once in front of a loop and not in each iteration, so the value "
    "lives through all of them",
    INVARIANT: "moved in front of a loop, as it is the same in every iteration; what "
    "is gathered lives through all of them on this backend, not on GPUs and TPUs",
    UNROLLED: "moved once for the iterations that the loop's unroll= writes out beside "
    "each other, so the value lives through them",
    FOLDED: "reduced with another line of the same value by one all-reduce over the "
    "devices of both, which is counted with the first",
    TILED: "summed in parts of whole tiles, whose rows are then sent on to the devices "
    "that they belong to",
    UNDECIDED: "one of several sums that the compiler joined: they do not add up, and "
    "which of them is missing cannot be told",
    MISSING: "not in the compiled program, or not as often as planned",
}


@dataclass(frozen=True, slots=True)
class LineCheck:
    """One line of the plan, and what the compiled program has for it.

    Attributes:
      line: the planned collective.
      status: `present`, `narrowed`, `widened`, `promoted`, `all-reduced`, `rewritten`,
        `merged`, `shared`, `once`, `hoisted`, `invariant`, `unrolled`, `folded`,
        `tiled`, `undecided` or `missing`.
      found: the compiled collectives for it, each `times` as often as counts for it.
      scales: those for its scales, where these have collectives of their own.
      runs: how often the compiled program runs them per step.
    """

    line: Collective
    status: str
    found: tuple[HloCollective, ...] = ()
    scales: tuple[HloCollective, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether it sends what is planned, or less, as far as the backend can."""
        return self.status in FAITHFUL

    @property
    def runs(self) -> int:
        """How often a step runs it."""
        return sum(c.times for c in self.found)

    @property
    def wire_bytes(self) -> int:
        """Bytes that each device sends for it per step."""
        return wire_bytes((*self.found, *self.scales))

    @property
    def overlapped_bytes(self) -> int:
        """The part of them that moves while a matrix product runs."""
        return overlapped_bytes((*self.found, *self.scales))
